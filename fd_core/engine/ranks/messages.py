"""Messages between rank 0 and the other ranks; encoded with msgspec, never pickled.

On the socket of steps: `RankStart`, `RankLoaded`, `Limits`, `RankReady`, then orders and a response to each:
`HoldAdapters` or `ChangeModel` and `RankChanged`, `RankStep` and `StepDigest`, `WARM_UP` or `LIVENESS_CHECK` and
`RankReady`; at any time a `Fault` instead. The steps of stages have no response: a `StagePlan` and later its
`StageOutcome`. On the socket of copies: a `SIGN` now and then while a rank loads, then a `BlockCopy` and its response,
followed by the bytes of blocks.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config import EngineConfig
from fd_core.engine.process.messages import Fault, decode_array, encode_array
from fd_core.ops.parallel import RankRendezvous
from fd_core.ops.weights import Adapter, WeightUse
from fd_core.types import IntArray, StepOutput, StepPlan

WARM_UP: Final = b""
"""The frame before the first plan: each rank warms up independently, and reports when its blocks may be written."""
SIGN: Final = b"!"
"""Prefix of a heartbeat frame of a rank that loads; the rest of the frame changes when it made progress."""
LIVENESS_CHECK: Final = b"?"
"""Frame of the liveness check of a rank without work."""
RANK_ENDPOINT: Final = "FD_RANK_ENDPOINT"
"""Environment variable with the `RankEndpoint` of a rank as JSON, which is secret."""


class RankEndpoint(msgspec.Struct, frozen=True):
    """Address of rank 0 for one rank."""

    steps: str
    copies: str
    keys: tuple[str, str, str] | None = None
    """For CURVE between machines: rank 0's public key, the rank's public key, and the rank's secret key."""


class RankStart(msgspec.Struct, frozen=True):
    """First message to a rank, on the socket of steps."""

    config: EngineConfig
    path: str | None
    rank: int
    group_address: str | RankRendezvous
    """Address of the exchange between ranks: the path of their shared memory, or a meeting."""


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A rank has its weights."""

    free_memory: int
    bytes_per_block: int
    kv_share: tuple[int, int]
    """First and end of the model's KV heads that it stores; for stages the same of layers."""
    weights: tuple[WeightUse, ...] = ()
    halvings: int = 0
    """Number of times that it halved the default sizes of its backend."""


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """A rank is ready for plans."""


class RankStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Work of every rank: a plan, and rank 0's draft tokens for it, so that all verify the same."""

    plan: StepPlan
    slots: IntArray
    drafts: IntArray
    counts: IntArray


class StagePlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """Work of every stage."""

    plan: StepPlan


class StageOutcome(msgspec.Struct, frozen=True, array_like=True, tag="outcome"):
    """Result of a step for the slots that sampled, see `PersistentBatch.latest`; one per plan, in order."""

    slots: IntArray
    gens: IntArray
    lengths: IntArray
    num_drafts: IntArray
    tokens: IntArray


class StepDigest(msgspec.Struct, frozen=True, tag="digest"):
    """Digest of a rank's result of a step."""

    step: int
    digest: bytes


class HoldAdapters(msgspec.Struct, frozen=True, array_like=True, tag="adapters"):
    """The complete set of adapters that a rank holds from now on; it extracts its share."""

    digests: tuple[str, ...]
    new: tuple[Adapter, ...]
    """Those of them that it does not hold yet."""


class ChangeModel(msgspec.Struct, frozen=True, array_like=True, tag="model"):
    """One part of an update of the weights, or of a sleep, between two steps. All ranks perform it."""

    part: Literal["load", "adopt", "discard", "release", "restore"]
    """`load` other weights alongside, `adopt` or `discard` them; `release` memory, `restore` it."""
    path: str = ""
    """Folder to load from."""
    weights: bool = False
    """True if the memory of weights is released, too."""


class RankChanged(msgspec.Struct, frozen=True, tag="changed"):
    """A rank carried out a `HoldAdapters` or `ChangeModel`, or is as it was before if there is an error."""

    error: str | None = None
    digest: str = ""
    """Digest of the weights that it has loaded, which must be equal on all ranks."""


RankOrder = RankStep | HoldAdapters | ChangeModel | StagePlan | StageOutcome
"""Messages to a rank once it is ready."""
RankMessage = RankLoaded | RankReady | StepDigest | RankChanged | Fault
"""Messages to rank 0 on the socket of steps."""


class BlockCopy(msgspec.Struct, frozen=True):
    """Blocks int32[n] to export, or to import from the bytes that follow; the response to either."""

    blocks: bytes
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Shape of the bytes that follow; empty if there are none."""
    error: str | None = None


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_DECODER: msgspec.msgpack.Decoder[RankOrder] = msgspec.msgpack.Decoder(RankOrder, dec_hook=decode_array)


def encode_order(order: RankOrder) -> bytes:
    """Return the frame of an order."""
    return _ENCODER.encode(order)


def decode_order(frame: bytes) -> RankOrder:
    """Return the argument of `encode_order`. Raises `msgspec.DecodeError` or `ValueError` for anything else."""
    return _DECODER.decode(frame)


def step_digest(frame: bytes, output: StepOutput) -> bytes:
    """Return a digest of the executed order and the sampled tokens, which must be equal on all ranks."""
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
