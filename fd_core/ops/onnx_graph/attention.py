"""KV writes and attention as standard operators.

They do not support block tables, and a step's rows differ in tokens and context. So the rows are split into two groups,
each padded to its largest row, at the split with the least padded work. Decoding rows and prompt chunks then do not pad
each other, and one graph serves every batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from fd_core.ops.contract import Heads, StepInput
from fd_core.ops.onnx_graph.graph import Graph, GraphSymbol
from fd_core.ops.onnx_graph.session import TracedLayer
from fd_core.types import IntArray

_GROUPS = 2


def declare_inputs(graph: Graph) -> None:
    """Declare the inputs that `plan` fills: tokens, positions and tables of each group, and the index of each token's
    result.

    A group has n rows, which are padded to q tokens and b blocks of keys.
    """
    for group in range(_GROUPS):
        graph.input(f"tokens_{group}", np.int32, (f"n{group}", f"q{group}"))
        graph.input(f"positions_{group}", np.int32, (f"n{group}", 1, f"q{group}", 1))
        graph.input(f"tables_{group}", np.int32, (f"n{group}", f"b{group}"))
        graph.input(f"holes_{group}", np.int64, (f"m{group}", 3))
        graph.input(f"keys_at_{group}", np.int32, (f"l{group}",))
    graph.input("places", np.int32, ("tokens",))


def plan(step: StepInput, block_size: int) -> dict[str, npt.NDArray[Any]]:
    """Return the attention inputs of a step, shared by all layers: the rows in two padded groups."""
    counts = np.diff(step.query_start)
    order = np.lexsort((step.context_len, counts))
    order = order[np.searchsorted(counts[order], 1) :]  # rows without tokens attend to nothing
    cut = _cut(counts[order], np.asarray(step.context_len)[order])
    values: dict[str, npt.NDArray[Any]] = {}
    places = np.empty(len(step.positions), np.int32)
    done = 0
    for index, rows in enumerate((order[:cut], order[cut:])):
        # Operators may reject an empty group: it gets one token of one row, whose result is unused.
        group = _group(step, rows, block_size) if len(rows) else _group(step, order[:1], block_size, alone=True)
        values |= {f"{name}_{index}": array for name, array in group.items()}
        tokens = group["tokens"]
        real = np.arange(tokens.shape[1]) < counts[rows, None]
        places[tokens[: len(rows)][real]] = np.flatnonzero(real) + done
        done += tokens.size
    return values | {"places": places}


def write(layer: TracedLayer, k: GraphSymbol, v: GraphSymbol, kv_slots: GraphSymbol) -> None:
    """Emit the write of k and v [T, nkv, d] to int32[T] slots; the layer's symbols are updated.

    The graph scatters in place: the cache's input and output are bound to the same memory.
    """
    graph = k.graph

    def places() -> GraphSymbol:
        size = graph.constant(layer.shape.block_size, np.int32)
        parts = [graph.op(kind, kv_slots, size) for kind in ("Div", "Mod")]
        columns = [graph.op("Unsqueeze", part, graph.integers(1)) for part in parts]
        return graph.op("Cast", graph.op("Concat", *columns, axis=1), to=TensorProto.INT64)

    where = graph.once(("places", kv_slots.name), places)
    layer.keys = graph.op("ScatterND", layer.keys, where, k)
    layer.values = graph.op("ScatterND", layer.values, where, v)


def attend(q: GraphSymbol, layer: TracedLayer, heads: Heads) -> GraphSymbol:
    """Emit the attention of q [T, nh, d], [T, nh * d]: the results of both groups in the original order."""
    graph, width = q.graph, heads.num_heads * heads.head_dim
    flat = graph.reshape(q, -1, width)
    parts = []
    for group in range(_GROUPS):
        found = graph.op(
            "Attention",
            graph.op("Gather", flat, GraphSymbol(graph, f"tokens_{group}")),
            _context(group, layer.keys, layer),
            _context(group, layer.values, layer),
            _mask(graph, group, heads.window),
            q_num_heads=heads.num_heads,
            kv_num_heads=heads.num_kv_heads,
            scale=float(heads.scale),
            softcap=heads.softcap,
        )
        parts.append(graph.reshape(found, -1, width))
    return graph.op("Gather", graph.op("Concat", *parts, axis=0), GraphSymbol(graph, "places"))


def _context(group: int, cached: GraphSymbol, layer: TracedLayer) -> GraphSymbol:
    """Return keys or values [n, L, nkv * d], zero beyond the context, where blocks may hold data of other requests.

    The mask does not suppress NaN. The zeros are written into the gathered copy, in place.
    """
    graph = cached.graph
    holes = GraphSymbol(graph, f"holes_{group}")

    def zeros() -> GraphSymbol:
        count = graph.op("Shape", holes, start=0, end=1)
        rest = graph.integers(layer.shape.num_kv_heads, layer.shape.head_dim)
        return graph.op("ConstantOfShape", graph.op("Concat", count, rest, axis=0))

    found = graph.op("Gather", cached, GraphSymbol(graph, f"tables_{group}"))
    found = graph.op("ScatterND", found, holes, graph.once(("zeros", group), zeros))
    return graph.reshape(found, 0, -1, layer.shape.num_kv_heads * layer.shape.head_dim)


def _mask(graph: Graph, group: int, window: int | None) -> GraphSymbol:
    """Return bool[n, 1, Q, L], true if a token attends to a key; shared by layers of one window."""

    def make() -> GraphSymbol:
        positions, keys = GraphSymbol(graph, f"positions_{group}"), GraphSymbol(graph, f"keys_at_{group}")
        seen = graph.op("LessOrEqual", keys, positions)
        if window is None:
            return seen
        first = graph.op("Sub", positions, graph.constant(window, np.int32))
        return graph.op("And", seen, graph.op("Greater", keys, first))

    return graph.once(("mask", group, window), make)


def _cut(counts: IntArray, contexts: IntArray) -> int:
    """Return the size of the first group among rows sorted by tokens; all rows if no split helps.

    A group costs rows x most tokens x longest context.
    """
    total = len(counts)
    sizes = np.arange(1, total + 1)
    before = sizes * counts * np.maximum.accumulate(contexts)
    longest_after = np.maximum.accumulate(contexts[::-1])[::-1]
    after = np.append((total - sizes[:-1]) * counts[-1] * longest_after[1:], 0)
    return total - int((before + after)[::-1].argmin())


def _group(
    step: StepInput, rows: npt.NDArray[Any], block_size: int, *, alone: bool = False
) -> dict[str, npt.NDArray[Any]]:
    """Pad n rows to Q tokens and L = B * block_size keys."""
    starts = np.asarray(step.query_start)[rows, None]
    counts = np.asarray(step.query_start)[rows + 1, None] - starts
    contexts = np.asarray(step.context_len)[rows, None]
    if alone:
        contexts, counts = contexts - counts + 1, np.ones_like(counts)
    place = np.arange(int(counts.max()), dtype=np.int32)
    real = place < counts
    used = -(-contexts // block_size)
    tables = np.asarray(step.block_tables)[rows, : int(used.max())]
    positions = np.where(real, contexts - counts + place, 0)
    keys_at = np.arange(tables.shape[1] * block_size, dtype=np.int32)
    return {
        # [n, Q], tokens of the step; padding repeats the row's first.
        "tokens": np.where(real, starts + place, starts).astype(np.int32),
        # [n, 1, Q, 1]; padding is 0, so that it attends to one key.
        "positions": positions[:, None, :, None].astype(np.int32),
        # [n, B]; padding repeats the row's first block, so that no row reads another one's data.
        "tables": np.where(np.arange(tables.shape[1]) < used, tables, tables[:, :1]).astype(np.int32),
        # [m, 3], the cells (row, block, offset) beyond the rows' contexts.
        "holes": np.argwhere(keys_at.reshape(-1, block_size) >= contexts[:, :, None]),
        "keys_at": keys_at,
    }
