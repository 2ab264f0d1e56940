"""Operations beyond tiles and splits: many rows, long contexts, wide steps, tables of a large vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fd_core.ops.contract import KVShape, Norm, Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.arrays import (
    Floats,
    Values,
    activations,
    assert_near,
    assert_same,
    float32_of,
    raw,
    step_input,
)
from fd_core.testing.models.layers import Geometry, LayerOn

SIZES = {"vocab_size": 140_003}
REQUIRES = ("primitives", "kv_transfer")

Rows = list[tuple[int, int]]

SMOLLM2 = Geometry(heads=9, kv_heads=3, d=64, hidden=96, block_size=32)
PLAIN = Geometry()
ONE_HEAD = Geometry(heads=8, kv_heads=1, d=64, hidden=64, block_size=16)
WINDOW = Geometry(heads=6, kv_heads=2, d=32, block_size=16, window=1030)


def spread(count: int, longest: int) -> Rows:
    """Return decodes at the boundaries of blocks and splits in random order, the longest one last."""
    edges = [1, 2, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 640, 1025]
    contexts = [edges[7 * index % len(edges)] for index in range(count - 1)]
    return [*((1, context) for context in contexts), (1, longest)]


ATTENTION: dict[str, tuple[Geometry, Rows, tuple[str, ...]]] = {
    "40 decodes": (SMOLLM2, spread(40, 640), ()),
    "67 decodes": (PLAIN, spread(67, 1025), ()),
    "131 decodes": (ONE_HEAD, spread(131, 513), ()),
    "one decode of 4,095": (SMOLLM2, [(1, 4095)], ()),
    "decodes of 2,048 and around": (SMOLLM2, [(1, 2047), (1, 2049), (1, 1), (1, 2048), (1, 2500)], ()),
    "one long with 40 short": (PLAIN, [(1, 3000), *((1, 1 + 3 * index) for index in range(40))], ()),
    "a step of 601": (SMOLLM2, [(601, 601)], ()),
    "601 behind 1,999": (ONE_HEAD, [(601, 2600)], ()),
    "701 in 45 rows": (
        PLAIN,
        [(1, 2100), (333, 333), *((1, 7 * index + 1) for index in range(40)), (257, 1300), (70, 71), (1, 9)],
        (),
    ),
    "a window over 2,600": (WINDOW, [(1, 2600), (130, 2049), (1, 1030), (1, 1031), (1, 5)], ("window",)),
    "every other row": (PLAIN, [(1 + index % 2, 40 + index) for index in range(41)], ()),
}


def exported(layer: LayerOn) -> Floats:
    return float32_of(layer.cache.export_blocks(np.arange(layer.cache.num_blocks, dtype=np.int32)))


@pytest.mark.parametrize("name", ATTENTION)
def test_layers_of_production_sizes(ops: Ops, require: Callable[..., None], name: str) -> None:
    """Compare the output of a layer, and check that the cache is written only where expected."""
    geometry, rows, abilities = ATTENTION[name]
    require(*abilities)
    ours, oracle = (LayerOn(each, geometry, rows) for each in (ops, NumpyOps()))
    before = exported(ours)
    for found, expected in zip(ours.run(ops), oracle.run(Ops), strict=True):
        assert_near(ops, ops.from_host(found), expected)
    written = np.zeros((ours.cache.num_blocks, geometry.block_size), np.bool_)
    written.reshape(-1)[step_input(rows, geometry.block_size, ours.blocks).kv_slots] = True
    free = written.copy()
    for (_, context), table in zip(rows, ours.blocks, strict=True):
        # Entries after the context in its last block are undefined; a pack may clear them.
        free[table[(context - 1) // geometry.block_size], (context - 1) % geometry.block_size + 1 :] = True
    after, right = exported(ours), exported(oracle)
    # Axes of the cache: block, layer, key or value, offset, head, element.
    assert_same(after[:, 0], before[:, 0], "another layer was written")
    ours_by_place, held, theirs = (each[:, 1].swapaxes(1, 2) for each in (after, before, right))
    assert_same(ours_by_place[~free], held[~free], "an entry of another token was written")
    assert_near(
        ops,
        ops.from_host(ours_by_place[written].reshape(written.sum(), -1)),
        theirs[written].reshape(written.sum(), -1),
    )


@pytest.mark.parametrize("rows", [1, 40, 67, 130, 601])
@pytest.mark.parametrize(("inner", "outer"), [(130, 1003), (515, 66)])
def test_linears_of_odd_sizes(ops: Ops, rows: int, inner: int, outer: int) -> None:
    make = Values(rows)
    x, a, b = make(rows, inner), make(outer, inner, scale=inner**-0.5), make(outer, inner, scale=inner**-0.5)
    assert_near(
        ops, ops.linear(activations(ops, x), ops.prepare_linear([raw(a), raw(b)])), np.hstack([x @ a.T, x @ b.T])
    )
    gate = x @ a.T
    gated = ops.gated_linear(activations(ops, x), ops.prepare_linear([raw(a), raw(b)], gated=True), "silu")
    assert_near(ops, gated, gate / (1 + np.exp(-gate)) * (x @ b.T))
    weight = make(inner)
    normed = ops.rms_norm(activations(ops, x), Norm(ops.prepare_vector(weight), 1e-5))
    assert_near(ops, normed, x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight)


def test_many_tokens_choose_among_many_experts(ops: Ops, require: Callable[..., None]) -> None:
    """Route 601 tokens to 33 experts, without the preceding norm, whose rounding may flip a close choice."""
    require("moe")
    geometry, rows = Geometry(experts=33, hidden=48, inner=24), [(601, 601)]
    ours, oracle = LayerOn(ops, geometry, rows), LayerOn(NumpyOps(), geometry, rows)
    assert ours.experts is not None
    assert oracle.experts is not None
    found = ops.moe(activations(ops, ours.x), ours.experts, "silu")
    assert_near(ops, found, NumpyOps().moe(oracle.x, oracle.experts, "silu"))


@pytest.mark.parametrize("vocabulary", [70_001, 140_003])
def test_tables_and_heads_of_a_large_vocabulary(ops: Ops, vocabulary: int) -> None:
    make = Values(1)
    table = make(vocabulary, 24)
    ids = np.random.default_rng(2).integers(0, vocabulary, 67).astype(np.int32)
    ids[:6] = 0, vocabulary - 1, 2**15, 2**16 - 1, 2**16, 65_537
    prepared = ops.prepare_embedding(raw(table))
    rows = ops.embedding(prepared, ops.from_host(ids))
    assert_near(ops, rows, table[ids])
    some = ops.gather_rows(rows, ops.from_host(np.array([66, 1, 0, 40, 40], np.int32)))
    for head in (ops.tied_head(prepared, raw(table)), ops.prepare_linear([raw(table)])):
        assert_near(ops, ops.logits_of(some, head, None), table[ids[[66, 1, 0, 40, 40]]] @ table.T)


def test_places_of_the_cache_beyond_2_16(ops: Ops) -> None:
    """Write and read the last, the first and the entries around 2^16 of a cache of 70,016."""
    block_size, blocks = 16, 4376
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=8, block_size=block_size)
    cache = ops.allocate_kv(shape, blocks)
    every = np.arange(blocks, dtype=np.int32)
    zeros = np.zeros_like(cache.export_blocks(every))
    cache.import_blocks(every, zeros)
    geometry = Geometry(heads=1, kv_heads=1, d=8, hidden=48, block_size=block_size)
    layer = LayerOn(ops, geometry, [(1, 1)])
    tables = np.array([[blocks - 1], [0], [4095], [4096], [blocks - 2], [2048]], np.int32)
    step = step_input([(block_size, block_size)] * len(tables), block_size, tables)
    x = Values(3)(len(step.kv_slots), 3 * 8)
    _, k, v = ops.split_heads(activations(ops, x), layer.heads)
    ops.write_kv(cache.layer(1), k, v, ops.from_host(step.kv_slots))
    held = cache.export_blocks(every)
    touched = sorted(np.flatnonzero(held.reshape(blocks, -1).any(axis=1)).tolist())
    assert touched == sorted(tables[:, 0].tolist())
    floats = float32_of(held[tables[:, 0], 1])
    keys, values = x[:, 8:16].reshape(-1, block_size, 1, 8), x[:, 16:].reshape(-1, block_size, 1, 8)
    assert_same(floats[:, 0], keys)
    assert_same(floats[:, 1], values)
    again = ops.allocate_kv(shape, blocks)
    again.import_blocks(every[::-1].copy(), held)
    assert_same(again.export_blocks(every), held[::-1])
