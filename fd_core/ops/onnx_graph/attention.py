"""KV writes and attention as standard operators.

They do not support block tables, and a step's rows differ in tokens and context. So the rows are split into two parts,
each padded to its largest row, at the split with the least padded work. Decoding rows and prompt chunks then do not pad
each other, and one graph serves every batch. Layers with the same block tables and the same window share a split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from fd_core.ops.contract import Heads, HostStep, StepInput
from fd_core.ops.onnx_graph.graph import Graph, GraphSymbol
from fd_core.ops.onnx_graph.session import PlanKey, TracedLayer
from fd_core.types import IntArray

_PARTS = 2
_SIZES = {"tokens": "nq", "positions": "n1q1", "firsts": "n1q1", "tables": "nb", "holes": "m3", "keys_at": "l"}
"""Dimensions of the inputs of a part of n rows, which are padded to q tokens and b blocks of keys."""


def plan(host: HostStep, block_size: int, heads: Heads) -> dict[str, npt.NDArray[Any]]:
    """Return the attention inputs of a step for layers with the window of these heads: the rows in two padded parts,
    and the index of each token's result."""
    whole, host = host, host.within(heads, block_size)
    begins = whole.context_len - host.context_len
    counts = np.diff(host.query_start)
    order = np.lexsort((host.context_len, counts))
    order = order[np.searchsorted(counts[order], 1) :]  # rows without tokens attend to nothing
    cut = _cut(counts[order], host.context_len[order])
    values: dict[str, npt.NDArray[Any]] = {}
    places = np.empty(host.query_start[-1], np.int32)
    done = 0
    for index, rows in enumerate((order[:cut], order[cut:])):
        # Operators may reject an empty part: it gets one token of one row, whose result is unused.
        alone = not len(rows)
        part = _part(host, order[:1] if alone else rows, begins, block_size, heads, alone=alone)
        values |= {f"{name}_{index}": array for name, array in part.items()}
        tokens = part["tokens"]
        real = np.arange(tokens.shape[1]) < counts[rows, None]
        places[tokens[: len(rows)][real]] = np.flatnonzero(real) + done
        done += tokens.size
    return values | {"places": places}


def key_of(heads: Heads, group: int) -> PlanKey:
    """Return what layers have in common that share their attention inputs."""
    return group, heads.window, heads.chunked


def plans(step: StepInput, kinds: Mapping[PlanKey, Heads], block_size: int) -> dict[str, npt.NDArray[Any]]:
    """Return the attention inputs of a step for these kinds of layers."""
    found: dict[str, npt.NDArray[Any]] = {}
    for key, heads in kinds.items():
        own = step.of_group(key[0])
        values = plan(HostStep(own.query_start, own.context_len, own.block_tables), block_size, heads)
        found |= {_name(name, key): array for name, array in values.items()}
    return found


def write(layer: TracedLayer, k: GraphSymbol, v: GraphSymbol, kv_slots: GraphSymbol) -> None:
    """Emit the write of k and v [T, nkv, d], or of the parts of latent keys, to int32[T] slots; the layer's symbols are
    updated.

    The graph scatters in place: the cache's input and output are bound to the same memory.
    """
    graph = k.graph

    def places() -> GraphSymbol:
        size = graph.constant(layer.shape.block_size, np.int32)
        parts = [graph.op(kind, kv_slots, size) for kind in ("Div", "Mod")]
        columns = [graph.op("Unsqueeze", part, graph.integers(1)) for part in parts]
        return graph.op("Cast", graph.op("Concat", *columns, axis=1), to=TensorProto.INT64)

    where = graph.once(("places", kv_slots.name), places)
    parts = {"keys": graph.op("Concat", k, v, axis=-1)} if layer.shape.latent else {"keys": k, "values": v}
    written = {part: graph.op("ScatterND", getattr(layer, part), where, symbol) for part, symbol in parts.items()}
    layer.written.append(written)
    layer.keys, layer.values = written["keys"], written.get("values", layer.values)


def attend(q: GraphSymbol, layer: TracedLayer, heads: Heads, group: int) -> GraphSymbol:
    """Emit the attention of q [T, nh, d], [T, nh * d or latent]: the results of both parts in the original order."""
    graph, width, key = q.graph, heads.num_heads * heads.head_dim, key_of(heads, group)
    layer.plans[key] = heads
    flat = graph.reshape(q, -1, width)
    parts = []
    for part in range(_PARTS):
        queries = graph.op("Gather", flat, _input(graph, "tokens", part, key))
        keys = _context(part, key, layer.keys, layer)
        values = graph.columns(keys, -heads.latent, 0) if heads.latent else _context(part, key, layer.values, layer)
        if heads.sinks is not None:
            found = _with_sinks(queries, keys, values, _mask(graph, part, key), heads)
        else:
            found = graph.op(
                "Attention",
                queries,
                keys,
                values,
                _mask(graph, part, key),
                q_num_heads=heads.num_heads,
                kv_num_heads=heads.num_kv_heads,
                scale=float(heads.scale),
                softcap=heads.softcap,
            )
        parts.append(graph.reshape(found, -1, heads.num_heads * (heads.latent or heads.head_dim)))
    places = graph.input(_name("places", key), np.int32, ("tokens",))
    return graph.op("Gather", graph.op("Concat", *parts, axis=0), places)


def _with_sinks(q: GraphSymbol, k: GraphSymbol, v: GraphSymbol, mask: GraphSymbol, heads: Heads) -> GraphSymbol:
    """Emit attention of q [n, Q, nh * d] over k and v [n, L, nkv * d] with a sink per head, [n, Q, nkv, g, d].

    The operator `Attention` has none.
    """
    graph, nkv, d = q.graph, heads.num_kv_heads, heads.head_dim

    def number(value: float) -> GraphSymbol:
        return graph.constant(value, np.float32)

    def by_head(x: GraphSymbol, perm: list[int]) -> GraphSymbol:
        return graph.op("Transpose", graph.reshape(x, 0, 0, nkv, -1, d), perm=perm)

    # [n, nkv, g, Q, L]
    scores = graph.op("MatMul", by_head(q, [0, 2, 3, 1, 4]), by_head(k, [0, 2, 3, 4, 1]))
    scores = graph.op("Mul", scores, number(heads.scale))
    if heads.softcap is not None:
        cap = number(heads.softcap)
        scores = graph.op("Mul", graph.op("Tanh", graph.op("Div", scores, cap)), cap)
    scores = graph.op("Where", graph.op("Unsqueeze", mask, graph.integers(1)), scores, number(-np.inf))
    sinks = graph.reshape(graph.weight(np.asarray(heads.sinks)), 1, nkv, -1, 1, 1)
    peaks = graph.op("Max", graph.op("ReduceMax", scores, graph.integers(4)), sinks)
    weights, more = (graph.op("Exp", graph.op("Sub", each, peaks)) for each in (scores, sinks))
    total = graph.op("Add", graph.op("ReduceSum", weights, graph.integers(4)), more)
    found = graph.op("MatMul", graph.op("Div", weights, total), by_head(v, [0, 2, 3, 1, 4]))
    return graph.op("Transpose", found, perm=[0, 3, 1, 2, 4])


def _name(name: str, key: PlanKey) -> str:
    return "_".join(map(str, (name, *key)))


def _input(graph: Graph, name: str, part: int, key: PlanKey) -> GraphSymbol:
    """Declare an input that `plans` fills."""
    name_of_part = _name(f"{name}_{part}", key)
    sizes = [int(size) if size.isdigit() else f"{size}_{name_of_part}" for size in _SIZES[name]]
    return graph.input(name_of_part, np.int64 if name == "holes" else np.int32, sizes)


def _context(part: int, key: PlanKey, cached: GraphSymbol, layer: TracedLayer) -> GraphSymbol:
    """Return keys or values [n, L, nkv * d], zero beyond the context, where blocks may hold data of other requests.

    The mask does not suppress NaN. The zeros are written into the gathered copy, in place.
    """
    graph = cached.graph
    holes = _input(graph, "holes", part, key)

    def zeros() -> GraphSymbol:
        count = graph.op("Shape", holes, start=0, end=1)
        rest = graph.integers(layer.shape.num_kv_heads, layer.shape.head_dim)
        return graph.op("ConstantOfShape", graph.op("Concat", count, rest, axis=0))

    found = graph.op("Gather", cached, _input(graph, "tables", part, key))
    found = graph.op("ScatterND", found, holes, graph.once(("zeros", part, key), zeros))
    return graph.reshape(found, 0, -1, layer.shape.num_kv_heads * layer.shape.head_dim)


def _mask(graph: Graph, part: int, key: PlanKey) -> GraphSymbol:
    """Return bool[n, 1, Q, L], true if a token attends to a key; shared by layers of one plan."""

    def make() -> GraphSymbol:
        positions, keys = (_input(graph, name, part, key) for name in ("positions", "keys_at"))
        seen = graph.op("LessOrEqual", keys, positions)
        if key[1] is None:
            return seen
        return graph.op("And", seen, graph.op("LessOrEqual", _input(graph, "firsts", part, key), keys))

    return graph.once(("mask", part, key), make)


def _cut(counts: IntArray, contexts: IntArray) -> int:
    """Return the size of the first part among rows sorted by tokens; all rows if no split helps.

    A part costs rows x most tokens x longest context.
    """
    total = len(counts)
    sizes = np.arange(1, total + 1)
    before = sizes * counts * np.maximum.accumulate(contexts)
    longest_after = np.maximum.accumulate(contexts[::-1])[::-1]
    after = np.append((total - sizes[:-1]) * counts[-1] * longest_after[1:], 0)
    return total - int((before + after)[::-1].argmin())


def _part(
    host: HostStep, rows: npt.NDArray[Any], begins: IntArray, block_size: int, heads: Heads, *, alone: bool
) -> dict[str, npt.NDArray[Any]]:
    """Pad n rows to Q tokens and L = B * block_size keys. `begins`: position at which each row's context begins."""
    starts = host.query_start[rows, None]
    counts = host.query_start[rows + 1, None] - starts
    contexts = host.context_len[rows, None]
    if alone:
        contexts, counts = contexts - counts + 1, np.ones_like(counts)
    place = np.arange(int(counts.max()), dtype=np.int32)
    real = place < counts
    used = -(-contexts // block_size)
    tables = host.block_tables[rows, : int(used.max())]
    positions = np.where(real, contexts - counts + place, 0)
    keys_at = np.arange(tables.shape[1] * block_size, dtype=np.int32)
    firsts = heads.first_key(positions + begins[rows, None]) - begins[rows, None]
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
        # [n, 1, Q, 1], the first key of each token; layers without a window do not read it.
        "firsts": firsts[:, None, :, None].astype(np.int32),
    }
