"""Small random steps and logits, on which providers are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from fd_core.ops.contract import Array, HostStep, PenaltyInput, SampleInput, StepInput

if TYPE_CHECKING:
    from fd_gpu_cuda.ops import CudaOps


_FAR = 1100
"""A context beyond what one program of an attention that is split walks over."""
_ROWS = 7
"""Rows of logits."""

Kinds = Iterator[tuple[str, tuple[tuple[int, int], ...]]]
Call = Callable[["CudaOps"], tuple[Array, ...]]
"""Computes something of the same logits with any pack."""


def kinds_of_steps(longest: int, window: int | None) -> Kinds:
    """Return kinds of steps as rows of (tokens, context), none beyond `longest`, one at least beyond the window."""
    far = min(_FAR if window is None else max(window + 21, 70), longest)
    kinds = {
        "a decode": ((1, 1), (1, 37), (1, far)),
        "chunks of prompts": ((20, 50), (1, 33), (7, 7), (1, far), (70, far)),
        "a decode with drafts": ((4, 40), (4, 9), (4, far)),
    }
    for kind, rows in kinds.items():
        contexts = [min(context, longest) for _, context in rows]
        yield kind, tuple((min(tokens, context), context) for (tokens, _), context in zip(rows, contexts, strict=True))


def random_step(
    ops: CudaOps, rows: Sequence[tuple[int, int]], size: int, vocabulary: int, random: np.random.Generator
) -> tuple[StepInput, int]:
    """Return a step of (tokens, context) rows over blocks of `size` tokens in random order, and how many blocks."""
    counts, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    query_start = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    entries = -(-contexts // size)
    num_blocks = int(entries.sum())
    tables = np.zeros((len(rows), entries.max()), np.int32)
    tables[np.arange(tables.shape[1]) < entries[:, None]] = random.permutation(num_blocks)
    positions = np.concatenate([np.arange(context - count, context, dtype=np.int32) for count, context in rows])
    row_of = np.repeat(np.arange(len(rows)), counts)
    slots = tables[row_of, positions // size] * size + positions % size
    token_ids = random.integers(0, vocabulary, len(positions)).astype(np.int32)
    width = int(counts.max())
    host = HostStep(query_start, contexts, tables)
    arrays = {
        "token_ids": token_ids,
        "positions": positions,
        "kv_slots": slots.astype(np.int32),
        "query_start": query_start,
        "context_len": contexts,
        "block_tables": tables,
        "logits_rows": query_start[1:] - 1,
    }
    placed = dict(zip(arrays, ops.upload(list(arrays.values())), strict=True))
    step = StepInput(
        **placed,
        max_query=width,
        max_context=int(contexts.max()),
        uniform=bool((counts == width).all()),
        host=host,
    )
    return step, num_blocks


class RandomLogits:
    """Logits float32[R, V], and all that is done with logits."""

    def __init__(self, ops: CudaOps, vocabulary: int, random: np.random.Generator) -> None:
        self._host = ops.from_host
        self._random = random
        self._vocabulary = vocabulary
        self._logits = ops.from_host(3 * random.standard_normal((_ROWS, vocabulary), np.float32))

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Return what each call computes, and the call; it may write into its own copy of the logits."""
        for name, rows in self._samplings():
            yield name, self._call("sample", rows)
        yield "penalties", self._call("penalize", self._penalties())
        rows = self._host(np.array([5, 0, 2], np.int32))
        words = self._random.integers(-(2**31), 2**31, (3, -(-self._vocabulary // 32))).astype(np.int32)
        yield "masked logits", self._call("mask_logits", rows, self._host(words))
        tokens = self._tokens(_ROWS)
        for top_n in (0, min(5, self._vocabulary)):
            yield "log-probabilities", self._call("logprobs", tokens, top_n)
        yield "ranks", self._call("ranks", tokens)
        cells = self._host(np.array([0, 3, 3, 6], np.int32)), self._tokens(4)
        yield "biased logits", self._call("add_at", *cells, self._host(np.array([1, 2, -4, 8], np.float32)))
        sampled, drafts = (self._random.integers(0, 2, (_ROWS, width)).astype(np.int32) for width in (4, 3))
        given = self._random.integers(0, 4, _ROWS).astype(np.int32)
        arrays = tuple(map(self._host, (sampled, drafts, given)))
        yield "accepted drafts", lambda ops: (ops.verify(*arrays),)
        slots, revoked = (self._host(np.array(each, np.int32)) for each in ([8, 1, 0, 3, 5, 6, 7], [2, 9]))
        matrix = arrays[0], self._host(given), slots, revoked, 11
        yield "the token matrix", lambda ops: (ops.token_matrix(*matrix),)

    def _call(self, method: str, *arguments: object) -> Call:
        """Return a call of one method with logits of its own."""

        def call(ops: CudaOps) -> tuple[Array, ...]:
            made = getattr(ops, method)(self._logits.clone(), *arguments)
            return made if isinstance(made, tuple) else (made,)

        return call

    def _samplings(self) -> Iterator[tuple[str, SampleInput]]:
        greedy = np.zeros(_ROWS, np.float32)
        random = np.array([0.7, 1, 0, 1.3, 0.2, 1, 5], np.float32)
        yield "greedy tokens", self._sampling(greedy, filters=False)
        yield "random tokens", self._sampling(random, filters=False)
        yield "filtered tokens", self._sampling(random, filters=True)

    def _sampling(self, temperature: np.ndarray, *, filters: bool) -> SampleInput:
        top_k = np.array([5, 0, 3, 0, 40, 0, 1], np.int32) if filters else np.zeros(_ROWS, np.int32)
        top_p = np.array([1, 0.8, 0.5, 1, 0.95, 1, 0.1] if filters else [1] * _ROWS, np.float32)
        min_p = np.array([0, 0, 0, 0.1, 0.02, 0, 0] if filters else [0] * _ROWS, np.float32)
        seeds = self._random.integers(0, 2**63, _ROWS).astype(np.uint64)
        positions = self._random.integers(0, 9999, _ROWS).astype(np.int32)
        columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        columns |= {"seeds": seeds, "positions": positions}
        placed = {name: self._host(column) for name, column in columns.items()}
        return SampleInput(**placed, all_greedy=not temperature.any(), any_filter=filters)

    def _penalties(self) -> PenaltyInput:
        counts = self._random.integers(0, 5, (4, self._vocabulary)).astype(np.int32)
        counts *= self._random.random(counts.shape) < 0.3
        arrays = {
            "rows": np.array([0, 2, 3], np.int32),
            "counts": counts,
            "counts_rows": np.array([1, 3, 0], np.int32),
            "draft_rows": np.array([0, 0, 2], np.int32),
            "draft_ids": self._random.integers(0, self._vocabulary, 3).astype(np.int32),
            "repetition": np.array([1.2, 1, 0.7], np.float32),
            "presence": np.array([0, 0.5, -0.25], np.float32),
            "frequency": np.array([0.3, 0, 0.1], np.float32),
        }
        return PenaltyInput(**{name: self._host(array) for name, array in arrays.items()})

    def _tokens(self, count: int) -> Array:
        return self._host(self._random.integers(0, self._vocabulary, count).astype(np.int32))
