"""Decodes replayed as CUDA graphs: one launch for a step instead of one for each kernel."""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import torch
from fd_core.config import Limits
from fd_core.ops.contract import Array, Forward, GroupTables, KVCache, KVShape, StepInput

from fd_gpu_cuda.device import Cuda, Replay, out_of_memory

_DENSE_UPTO = 8
_STEP = 8
_COARSE_FROM = 128
_COARSE_STEP = 32
_LARGEST = 512
"""Maximum rows: larger decodes are compute-bound, so a graph would save nothing."""
_LARGEST_DRAFTED = 256
"""Maximum tokens of a decode with drafts. So many are multiplied while the weights are read, on H100 and A100, so
padding of short rows is nearly free."""


@dataclass(frozen=True)
class GraphShapes:
    """Shapes to capture: rows of one token, and rows of 1 + k tokens, in fewer sizes."""

    single: tuple[int, ...]
    """Numbers of rows, ascending."""
    drafted: tuple[int, ...]
    """The same for rows of `width` tokens; none without drafts."""
    width: int

    @classmethod
    def of(cls, limits: Limits) -> GraphShapes:
        """Return the shapes for an engine's limits, within its step token budget.

        One token a row: powers of two, then steps of 8, then of 32, up to the most rows that the limits allow. So where
        a decode fits the budget, it fits padded. With drafts: powers of two, of rows no longer than the context.
        """
        width, budget = min(1 + limits.max_drafts, limits.max_model_len), limits.max_num_batched_tokens
        powers = [1 << power for power in range(_DENSE_UPTO.bit_length())]
        medium = range(2 * _STEP, _COARSE_FROM, _STEP)
        large = range(_COARSE_FROM, _LARGEST + 1, _COARSE_STEP)
        most = min(limits.max_num_seqs, budget, _LARGEST)
        single = (*(size for size in (*powers, *medium, *large) if size < most), most)
        most = min(limits.max_num_seqs, min(budget, _LARGEST_DRAFTED) // width) if width > 1 else 0
        drafted = (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most) if most else ()
        return cls(single, drafted, width)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (rows, tokens of a row), the shape with the most tokens first."""
        shapes = [*((rows, 1) for rows in self.single), *((rows, self.width) for rows in self.drafted)]
        return iter(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape), reverse=True))

    @cached_property
    def most_tokens(self) -> int:
        """Tokens of the largest shape; 0 if there is none."""
        return max((rows * width for rows, width in self), default=0)

    def fitting(self, rows: int, width: int) -> tuple[int, int] | None:
        """Return the smallest shape for `rows` rows with up to `width` tokens each, if any."""
        if width > self.width:
            return None
        sizes, width = (self.single, 1) if width == 1 else (self.drafted, self.width)
        index = bisect_left(sizes, rows)
        return (sizes[index], width) if index < len(sizes) else None


logger = logging.getLogger(__name__)

Shape = tuple[int, int]
"""Rows, and tokens of each row."""


@dataclass(frozen=True, slots=True)
class _Graph:
    step: StepInput
    """The memory that the graph reads."""
    vectors: tuple[Array, ...]
    """The part of that memory with one entry per token or row."""
    logits: Array
    """The memory that it writes, float32[tokens, V]."""
    replay: Replay


class GraphInputs:
    """Input memory of all graphs of a device; each shape uses views of that of the largest.

    Slots and tables are those of every group of layers of the cache.
    """

    def __init__(self, shapes: GraphShapes, limits: Limits, device: torch.device) -> None:
        def zeros(*size: int) -> Array:
            return torch.zeros(size, dtype=torch.int32, device=device)

        tokens, rows, groups = shapes.most_tokens, max(rows for rows, _ in shapes), limits.groups.count
        self._max_context, self._blocks = limits.max_model_len, limits.blocks_per_seq
        self._token_ids, self._positions = zeros(2, tokens)
        self._kv_slots = zeros(groups * tokens)
        self._context_len = zeros(rows)
        self._lora_slots = zeros(tokens)
        self._block_tables = zeros(groups * rows * self._blocks)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._query_start = {width: starts * width for width in {1, shapes.width}}
        self._columns = torch.arange(tokens, dtype=torch.int32, device=device)
        # A graph reads one of these per token, even if fewer are needed, so stale entries must be valid tokens of the
        # graph: each shape has separate memory.
        sizes = [rows * width for rows, width in shapes]
        self._logits_rows = dict(zip(shapes, zeros(sum(sizes)).split(sizes), strict=True))

    def of(self, shape: Shape, spare_block: int, cache: KVShape, *, adapted: bool = False) -> StepInput:
        """Return the memory of a step of a shape, filled with padding, for contexts of any length.

        `adapted` adds adapter slots.
        """
        rows, width = shape
        tokens, groups = rows * width, cache.groups.count
        kv_slots = self._kv_slots[: groups * tokens].fill_(spare_block * cache.block_size).view(groups, tokens)
        tables = self._block_tables[: groups * rows * self._blocks].fill_(spare_block).view(groups, rows, -1)
        torch.remainder(self._columns[:tokens], width, out=self._positions[:tokens])
        self._token_ids[:tokens].zero_()
        self._context_len[:rows].fill_(width)
        self._lora_slots[:tokens].zero_()
        return StepInput(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            kv_slots=kv_slots[0],
            query_start=self._query_start[width][: rows + 1],
            context_len=self._context_len[:rows],
            block_tables=tables[0],
            logits_rows=self._logits_rows[shape],
            max_query=width,
            max_context=self._max_context,
            uniform=True,
            lora_slots=self._lora_slots[:tokens] if adapted else None,
            grouped=GroupTables(kv_slots, tables) if groups > 1 else None,
        )


_FEW: Final = 5
"""Number of graphs captured to estimate one: the driver allocates 2 MiB, of which a graph may use a part."""


class DeviceGraphs:
    """Shared memory of graph captures: one for inputs, and one for logits.

    Steps of one device run sequentially, and readers of logits are queued before the next step, so graphs of all sizes,
    and those of a draft model, share both.
    """

    def __init__(self, cuda: Cuda, shapes: GraphShapes, limits: Limits, *, few: bool = False) -> None:
        """`few` captures only some of the shapes and estimates the memory of the others."""
        self.shapes = shapes
        self.bytes_to_come = 0
        """Estimated memory of the graphs that were not captured."""
        self._few = few
        self._cuda = cuda
        self._limits = limits
        self._inputs: GraphInputs | None = None
        self._logits: Array | None = None
        self.head_output: Array | None = None
        """Target of the logits [R, V] while a decode is captured; the output projection may write there."""

    def capture(
        self, forward: Forward, cache: KVCache, spare_block: int, *, adapted: bool = False
    ) -> dict[Shape, _Graph]:
        """Capture a forward in every shape, for steps with or without adapters.

        Shapes that do not fit in memory have no graph; a rehearsal, and several ranks, which must act alike, raise the
        error instead.
        """
        if self._inputs is None:
            self._inputs = GraphInputs(self.shapes, self._limits, self._cuda.device)
        graphs, shapes, free = dict[Shape, _Graph](), list(self.shapes), list[int]()
        chosen = [shapes[0], *shapes[1 :: max(1, len(shapes) // _FEW)]][:_FEW] if self._few else shapes
        with self._cuda.capturing():
            for shape in chosen:
                step = self._inputs.of(shape, spare_block, cache.shape, adapted=adapted)
                try:
                    logits = self._logits_of(forward, step, cache)
                    replay = self._cuda.capture(partial(self._write, forward, step, cache, logits))
                except RuntimeError as error:
                    if not out_of_memory(error) or self._few or self._cuda.ranks is not None:
                        raise
                    rows, width = shape
                    logger.warning("decodes of %d x %d tokens and fewer are not replayed: %s", rows, width, error)
                    break
                graphs[shape] = _Graph(step, _vectors(step), logits, replay)
                free.append(self._cuda.free_on_driver())
        if len(shapes) > len(chosen) > 1:
            # The first one has set up the shared state.
            each = -(-max(free[0] - free[-1], 0) // (len(chosen) - 1))
            self.bytes_to_come += each * (len(shapes) - len(chosen))
        return graphs

    def replay(self, graph: _Graph, step: StepInput) -> Array:
        """Queue a step; return its logits, which are valid until the next one."""
        wanted = len(step.logits_rows)
        targets = [*graph.vectors, graph.step.logits_rows[:wanted]]
        torch._foreach_copy_(targets, [*_vectors(step), step.logits_rows])
        # Stale entries in the rest of the tables are beyond the contexts of this step.
        tables = _places(step).block_tables
        _places(graph.step).block_tables[..., : tables.shape[-1]].copy_(tables)
        graph.replay()
        return graph.logits[:wanted]

    def _logits_of(self, forward: Forward, step: StepInput, cache: KVCache) -> Array:
        """Return the memory for the logits of a step; the largest must be requested first."""
        rows = len(step.logits_rows)
        if self._logits is None:
            vocabulary = forward(step, cache).shape[1]
            self._logits = torch.zeros(rows, vocabulary, dtype=torch.float32, device=self._cuda.device)
        return self._logits[:rows]

    def _write(self, forward: Forward, step: StepInput, cache: KVCache, logits: Array) -> None:
        self.head_output = logits
        try:
            found = forward(step, cache)
        finally:
            self.head_output = None
        if found.data_ptr() != logits.data_ptr():
            logits.copy_(found)


def _places(step: StepInput) -> StepInput | GroupTables:
    """Return the owner of the slots and tables of all groups of layers."""
    return step.grouped or step


def _vectors(step: StepInput) -> tuple[Array, ...]:
    vectors = step.token_ids, step.positions, _places(step).kv_slots, step.context_len
    return vectors if step.lora_slots is None else (*vectors, step.lora_slots)


class GraphedForward:
    """A model's forward that replays a graph for decodes of the given shapes, and runs other steps eagerly.

    The runner pads a decode to one of the shapes. All of them are captured, the largest first, when the first decode
    runs, which is before the first request.
    """

    def __init__(self, forward: Forward, graphs: DeviceGraphs, tables: int | None = None) -> None:
        """`tables`: number of adapter tables so far; None for a forward of steps without adapters."""
        self._forward = forward
        self._graphs = graphs
        self._tables = tables
        self._captured: weakref.WeakKeyDictionary[KVCache, dict[Shape, _Graph]] = weakref.WeakKeyDictionary()

    def take_graphs(self, before: GraphedForward) -> None:
        """Reuse the graphs of the same model with other adapters, unless the tables changed."""
        if self._graphs is before._graphs and self._tables == before._tables:
            self._captured = before._captured

    def __call__(self, step: StepInput, cache: KVCache) -> Array:
        """Return float32 logits [R, V]; those of a replay are valid until the next one."""
        graph = self._graph(step, cache)
        return self._forward(step, cache) if graph is None else self._graphs.replay(graph, step)

    def _graph(self, step: StepInput, cache: KVCache) -> _Graph | None:
        """Return the graph of a step, or None.

        Steps with adapters have separate graphs, which read each token's adapter slot, and tables with fixed addresses;
        see `AdaptedOps.place_loras`.
        """
        shape = (len(step.context_len), step.max_query)
        plain = step.uniform and step.states is None and step.ends is None
        fits = plain and self._graphs.shapes.fitting(*shape) == shape
        if not fits or (step.lora_slots is None) != (self._tables is None):
            return None
        if cache.spare_block is None:
            return None
        self.prepare(cache)
        graph = self._captured[cache].get(shape)
        return None if graph is None or step.block_tables.shape[1] > graph.step.block_tables.shape[1] else graph

    def prepare(self, cache: KVCache) -> None:
        """Capture the missing graphs."""
        if cache.spare_block is None or cache in self._captured:
            return
        adapted = self._tables is not None
        self._captured[cache] = self._graphs.capture(self._forward, cache, cache.spare_block, adapted=adapted)
        shapes = ", ".join(f"{rows} x {width}" for rows, width in self._captured[cache]) or "no number"
        logger.debug("captured decodes of %s tokens%s", shapes, " with adapters" if adapted else "")
