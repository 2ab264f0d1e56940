"""Decodes replayed as CUDA graphs: one launch for a step instead of one for each kernel."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, replace
from functools import partial

import torch
from fd_core.ops.contract import Array, Forward, KVCache, StepInput

from fd_gpu_cuda.device import Cuda, Replay

__all__ = ["GraphedForward"]

logger = logging.getLogger(__name__)

_TOKEN_ARRAYS = ("token_ids", "positions", "kv_slots", "context_len")
"""Arrays of a decode with one entry for each row."""


@dataclass(frozen=True, slots=True)
class _Graph:
    step: StepInput
    """The memory that the graph reads."""
    replay: Replay
    logits: Array
    """The memory that it writes."""


class GraphedForward:
    """A model's forward that replays a graph for decodes of the sizes given, and runs anything else as it is.

    The runner pads a decode to one of the sizes. All of them are captured, the largest first, when the first decode
    runs, which is before the first request.
    """

    def __init__(self, forward: Forward, cuda: Cuda, sizes: tuple[int, ...], max_model_len: int) -> None:
        self._forward = forward
        self._cuda = cuda
        self._sizes = sizes
        self._max_model_len = max_model_len
        self._graphs: weakref.WeakKeyDictionary[KVCache, dict[int, _Graph]] = weakref.WeakKeyDictionary()

    def __call__(self, step: StepInput, cache: KVCache) -> Array:
        """Return float32 logits [R, V]; those of a replay hold until the next one."""
        rows = len(step.context_len)
        if step.max_query != 1 or rows not in self._sizes or cache.spare_block is None:
            return self._forward(step, cache)
        if cache not in self._graphs:
            self._graphs[cache] = self._capture(cache, cache.spare_block)
        graph = self._graphs[cache][rows]
        if step.block_tables.shape[1] > graph.step.block_tables.shape[1]:
            return self._forward(step, cache)
        wanted = _fill(graph.step, step)
        graph.replay()
        return graph.logits[:wanted]

    def _capture(self, cache: KVCache, spare_block: int) -> dict[int, _Graph]:
        graphs = {}
        largest = self._blank_step(self._sizes[-1], cache, spare_block)
        for size in reversed(self._sizes):
            step = _first(largest, size)
            replay, logits = self._cuda.capture(partial(self._forward, step, cache))
            graphs[size] = _Graph(step, replay, logits)
        logger.info("captured decodes of %s rows", ", ".join(map(str, self._sizes)))
        return graphs

    def _blank_step(self, rows: int, cache: KVCache, spare_block: int) -> StepInput:
        """Return a step of padding alone, with tables as wide as any can be."""
        size = cache.shape.block_size

        def filled(value: int, *shape: int) -> Array:
            return torch.full(shape, value, dtype=torch.int32, device=self._cuda.device)

        return StepInput(
            token_ids=filled(0, rows),
            positions=filled(0, rows),
            kv_slots=filled(spare_block * size, rows),
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=self._cuda.device),
            context_len=filled(1, rows),
            block_tables=filled(spare_block, rows, -(-self._max_model_len // size)),
            logits_rows=filled(0, rows),
            max_query=1,
            max_context=self._max_model_len,
        )


def _first(step: StepInput, rows: int) -> StepInput:
    """Return views of the first rows of a decode."""
    views = {name: getattr(step, name)[:rows] for name in (*_TOKEN_ARRAYS, "block_tables", "logits_rows")}
    return replace(step, query_start=step.query_start[: rows + 1], **views)


def _fill(target: StepInput, source: StepInput) -> int:
    """Queue copies of a decode into the memory of a graph of its size; returns how many rows of logits it wants."""
    for name in _TOKEN_ARRAYS:
        getattr(target, name).copy_(getattr(source, name))
    # What an earlier step left in the rest of the tables lies beyond the contexts of this one.
    target.block_tables[:, : source.block_tables.shape[1]].copy_(source.block_tables)
    wanted = len(source.logits_rows)
    target.logits_rows[:wanted].copy_(source.logits_rows)
    # A row that a larger batch left there would lie beyond this one, and on a GPU nothing stops a read beyond.
    target.logits_rows[wanted:].zero_()
    return wanted
