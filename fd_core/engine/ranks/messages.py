"""What rank 0 says to the other ranks and hears of them; encoded with msgspec, never pickled.

On the socket of steps: `RankStart`, `RankLoaded`, `Limits`, `RankReady`, then orders and an answer to each:
`HoldAdapters` and `AdaptersHeld`, `RankStep` and `StepDigest`, `WARM_UP` or `LOOK` and `RankReady`; at any time a
`Fault` instead. The orders of stages have no answer: a `StagePlan` and later its `StageOutcome`. On the socket of
copies: a `SIGN` now and then while a rank loads, then a `BlockCopy` and its answer, with the bytes of blocks behind it.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config import EngineConfig
from fd_core.engine.process.messages import Fault, decode_array, encode_array
from fd_core.ops.parallel import RankMeeting
from fd_core.ops.weights import Adapter, WeightUse
from fd_core.types import IntArray, StepOutput, StepPlan

WARM_UP: Final = b""
"""The frame before the first plan: every rank warms up by itself, and says when its blocks may be written to."""
SIGN: Final = b"!"
"""How a frame begins by which a rank that loads says that it goes on; what follows changes when it came further."""
LOOK: Final = b"?"
"""The frame that asks a rank for which there is nothing to do whether it goes on."""
RANK_DOOR: Final = "FD_RANK_DOOR"
"""The variable in which a rank finds its `RankDoor`, as JSON: a secret of its process."""


class RankDoor(msgspec.Struct, frozen=True):
    """Where a rank finds rank 0."""

    steps: str
    copies: str
    keys: tuple[str, str, str] | None = None
    """For CURVE, which sockets between machines speak: rank 0's public key, the rank's own, and its secret one."""


class RankStart(msgspec.Struct, frozen=True):
    """What a rank is told first, on the socket of steps."""

    config: EngineConfig
    path: str | None
    rank: int
    place: str | RankMeeting
    """Where ranks exchange what they computed: the path of memory that they share, or a meeting."""


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A rank has its weights."""

    free_memory: int
    bytes_per_block: int
    kv_share: tuple[int, int]
    """The first of the model's KV heads that it keeps, and the one behind the last; of stages the same of layers."""
    weights: tuple[WeightUse, ...] = ()


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """A rank waits for plans."""


class RankStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What every rank executes: a plan, and the drafts that rank 0 has for it, so that all verify the same."""

    plan: StepPlan
    slots: IntArray
    drafts: IntArray
    counts: IntArray


class StagePlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """What every stage executes."""

    plan: StepPlan


class StageOutcome(msgspec.Struct, frozen=True, array_like=True, tag="outcome"):
    """What a step made of the slots that sampled, see `PersistentBatch.latest`; one for each plan, in their order."""

    slots: IntArray
    gens: IntArray
    lengths: IntArray
    num_drafts: IntArray
    tokens: IntArray


class StepDigest(msgspec.Struct, frozen=True, tag="digest"):
    """What a rank made of a step, in short."""

    step: int
    digest: bytes


class HoldAdapters(msgspec.Struct, frozen=True, array_like=True, tag="adapters"):
    """What a rank holds from now on, and nothing else; it cuts its share out."""

    digests: tuple[str, ...]
    new: tuple[Adapter, ...]
    """Those of them that it does not hold yet."""


class AdaptersHeld(msgspec.Struct, frozen=True, tag="adapters-held"):
    """A rank holds what it was told to, or what it held before if there is an error."""

    error: str | None = None


RankOrder = RankStep | HoldAdapters | StagePlan | StageOutcome
"""What a rank is told once it is ready."""
RankMessage = RankLoaded | RankReady | StepDigest | AdaptersHeld | Fault
"""What rank 0 hears on the socket of steps."""


class BlockCopy(msgspec.Struct, frozen=True):
    """Blocks int32[n] that are to be exported, or imported from the bytes that follow; the answer to either."""

    blocks: bytes
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Of the bytes that follow; empty where none do."""
    error: str | None = None


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_DECODER: msgspec.msgpack.Decoder[RankOrder] = msgspec.msgpack.Decoder(RankOrder, dec_hook=decode_array)


def encode_order(order: RankOrder) -> bytes:
    """Return the frame of an order."""
    return _ENCODER.encode(order)


def decode_order(frame: bytes) -> RankOrder:
    """Return what `encode_order` was given. Raises `msgspec.DecodeError` or `ValueError` for anything else."""
    return _DECODER.decode(frame)


def step_digest(frame: bytes, output: StepOutput) -> bytes:
    """Return what has to be the same on all ranks: what is executed, and what was sampled."""
    digest = hashlib.blake2b(frame, digest_size=8)
    digest.update(output.tokens.tobytes())
    return digest.digest()


def encode_blocks(blocks: npt.NDArray[np.int32], data: npt.NDArray[Any] | None = None) -> list[bytes]:
    """Return the parts of a message about blocks."""
    shape, dtype = ((), "") if data is None else (data.shape, data.dtype.str)
    head = msgspec.msgpack.encode(BlockCopy(blocks.astype("<i4").tobytes(), dtype, shape))
    return [head] if data is None else [head, np.ascontiguousarray(data).tobytes()]


def decode_blocks(parts: list[bytes]) -> tuple[BlockCopy, npt.NDArray[np.int32], npt.NDArray[Any] | None]:
    """Return a message about blocks, the blocks, and their data if there is any."""
    head = msgspec.msgpack.decode(parts[0], type=BlockCopy)
    data = np.frombuffer(parts[1], np.dtype(head.dtype)).reshape(head.shape) if len(parts) > 1 else None
    return head, np.frombuffer(head.blocks, "<i4").astype(np.int32), data
