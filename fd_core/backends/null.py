"""The null backend: scripted tokens without a framework, for tests of everything around the model.

Its "KV" of a position is a running hash of all tokens up to there, read and written through the block tables, so the
next token depends on every token before it and on every block being the right one: a wrong block, a lost token or a
stale slot changes the text.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fd_core.backends.contract import Availability, LoadProgress
from fd_core.backends.cpu import ProcessorBackend
from fd_core.ops.contract import KVCache, KVShape, Ops, StepInput
from fd_core.ops.parallel import RankGroup, Stage
from fd_core.types import IntArray

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, hence invertible modulo 2^64."""
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))


class NullCache(KVCache):
    """KV cache with one 64-bit hash per position, exposed as one float32 of key and one of value."""

    def __init__(self, shape: KVShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.hashes = np.zeros((num_blocks, shape.block_size), np.uint64)

    def layer(self, index: int) -> Any:
        """The hashes, by block and offset."""
        return self.hashes

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Hashes as float32 bits [n, 1, 2, block_size, 1, 1]."""
        halves = self.hashes[blocks].view(np.float32).reshape(len(blocks), self.shape.block_size, 2)
        return np.ascontiguousarray(halves.transpose(0, 2, 1))[:, None, :, :, None, None]

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        halves = np.ascontiguousarray(data[:, 0, :, :, 0, 0].transpose(0, 2, 1), np.float32)
        self.hashes[blocks] = halves.view(np.uint64)[:, :, 0]


class NullModel:
    """Deterministic scripted model over `vocab_size` tokens; it emits `eos` now and then."""

    architecture = "null"
    num_parameters = 0
    weights = ()
    state_size = 1
    generates = True

    def __init__(self, vocab_size: int = 257, max_positions: int = 8192, eos_bias: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.eos_token_ids = (vocab_size - 1,)
        self._eos_bias = np.float32(eos_bias)
        self._ids = np.arange(vocab_size, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)

    def kv_shape(self, block_size: int) -> KVShape:
        """One layer, one head of one element."""
        return KVShape(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size)

    def forward(self, step: StepInput, cache: KVCache) -> Any:
        """Extend the hashes by the step's tokens and derive logits from them."""
        return self.head(self.states(step, cache)[step.logits_rows])

    def states(self, step: StepInput, cache: KVCache) -> Any:
        """Extend the hashes by the step's tokens and return them, uint64[T, 1]."""
        hashes: npt.NDArray[np.uint64] = cache.layer(0)
        flat, size = hashes.reshape(-1), cache.shape.block_size
        begins = step.query_start[:-1]
        last = step.positions[begins] - 1  # position before each row
        before = flat[step.block_tables[np.arange(len(begins)), last // size] * size + last % size]
        before[last < 0] = 0
        if len(step.token_ids) == len(begins):
            result = next_hashes(before, step.token_ids)
        else:
            bounds = step.query_start.tolist()
            rows = zip(before, bounds, bounds[1:], strict=False)  # there is a bound more
            result = np.concatenate([running_hashes(each, step.token_ids[row:end]) for each, row, end in rows])
        flat[step.kv_slots] = result
        return result[:, None]

    def head(self, states: npt.NDArray[np.uint64]) -> Any:
        """Derive logits from hashes."""
        mixed = states ^ self._ids
        mixed ^= mixed >> np.uint64(31)
        mixed *= _MULTIPLIER
        mixed >>= np.uint64(40)
        logits = mixed.astype(np.float32)
        logits *= np.float32(2**-21)  # to be below 8
        logits[:, self.eos_token_ids[0]] += self._eos_bias
        return logits


def running_hashes(before: np.uint64, tokens: IntArray) -> npt.NDArray[np.uint64]:
    """Return the polynomial hash h[i] = h[i-1] * M + t[i] + 1 modulo 2^64 of each prefix, h[-1] = `before`."""
    powers, inverses = _powers(len(tokens))
    hashes = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * inverses, dtype=np.uint64)
    hashes += before
    hashes *= powers
    return hashes


@functools.lru_cache(64)
def _powers(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the first `count` powers of the multiplier and of its inverse."""
    each = np.full(count, _MULTIPLIER), np.full(count, _INVERSE)
    return np.cumprod(each[0], dtype=np.uint64), np.cumprod(each[1], dtype=np.uint64)


def next_hashes(before: npt.NDArray[np.uint64], tokens: IntArray) -> npt.NDArray[np.uint64]:
    """Return uint64[n], the hashes of n texts after one more token each; `before` are the hashes so far."""
    return before * _MULTIPLIER + tokens.astype(np.uint64) + np.uint64(1)


class NullBackend(ProcessorBackend):
    """Backend with scripted tokens, no framework and no weights."""

    name: ClassVar[str] = "null"
    default_pipeline_depth: ClassVar[int] = 2
    auto_rank: ClassVar[int] = -1
    needs_checkpoint: ClassVar[bool] = False
    updates_weights: ClassVar[bool] = True
    limits = MappingProxyType(
        {
            "bfloat16": "it has no weights",
            "checkpoints": "it plays a script and reads no checkpoint",
            "primitives": "its script needs none; it samples with the reference implementation",
        }
    )

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True, "needs nothing")

    def make_ops(self) -> Ops:
        """The numpy pack samples and post-processes; the model itself uses no ops."""
        from fd_core.ops.numpy.ops import NumpyOps

        class NullOps(NumpyOps):
            """The numpy pack with the null cache, and without weights to quantize."""

            weight_formats = frozenset()
            kv_dtypes = ()

            def cut(self, stage: Stage) -> None:
                Ops.cut(self, stage)

            def join(self, group: RankGroup) -> None:
                super().join(group)
                self.parallel = replace(group.parallel, gathers=True)  # it has no partial sums

            def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
                return NullCache(shape, num_blocks)

        self.requested_dtype("float32")
        return NullOps()

    def free_memory(self) -> int:
        """Return 64 MiB, which hold the hashes of eight million positions."""
        return 64 * 2**20

    def describe(self) -> str:
        return "scripted tokens without meaning, for tests"

    def load_model(self, path: Path | None, ops: Ops, progress: LoadProgress) -> NullModel:
        progress(1, 1)
        return NullModel()
