"""Attention over groups of rows, and in-place KV writes."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.ops.contract import Heads, HostStep, KVShape, Rope
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.onnx_graph.attention import plan, write
from fd_core.ops.onnx_graph.graph import Graph
from fd_core.ops.onnx_graph.pack import OnnxOps
from fd_core.ops.onnx_graph.session import CPU, Session, TracedCache, bound
from fd_core.testing.models.arrays import step_input

BLOCK = 4
ROWS = st.lists(
    st.integers(1, 24).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context))),
    min_size=1,
    max_size=7,
)


def step_of(rows):
    tables = np.random.default_rng(3).permutation(len(rows) * 6).reshape(len(rows), 6).astype(np.int32)
    step = step_input(rows, BLOCK, tables)
    used = -(-step.context_len[:, None] // BLOCK)
    return replace(step, block_tables=np.where(np.arange(6) < used, tables, np.int32(2**20)))


WINDOWS = st.sampled_from([(None, False), (3, False), (6, True)])


def heads_of(window=None, chunked=False):
    return Heads(4, 2, 8, 0.3, Rope(None, None), window=window, chunked=chunked)


def plan_of(step, *window):
    return plan(HostStep(step.query_start, step.context_len, step.block_tables), BLOCK, heads_of(*window))


@settings(deadline=None, max_examples=200)
@given(ROWS, WINDOWS)
def test_parts_partition_tokens_without_foreign_blocks(rows, window):
    step = step_of(rows)
    found = plan_of(step, *window)
    results = np.concatenate([found[f"tokens_{part}"].reshape(-1) for part in range(2)])
    assert results[found["places"]].tolist() == list(range(len(step.positions)))
    assert len(set(found["places"].tolist())) == len(step.positions)
    row_of = np.repeat(np.arange(len(rows)), np.diff(step.query_start))
    for part in range(2):
        tokens, tables = found[f"tokens_{part}"], found[f"tables_{part}"]
        assert len(found[f"keys_at_{part}"]) == tables.shape[1] * BLOCK
        for mine, table in zip(tokens, tables, strict=True):
            (row,) = set(row_of[mine].tolist())
            assert set(table.tolist()) <= set(step.block_tables[row].tolist()) - {2**20}


def test_rows_are_split_where_padding_costs_most():
    found = plan_of(step_of([(1, 9), (20, 20), (1, 5)]))
    assert [found[f"tokens_{part}"].shape for part in range(2)] == [(2, 1), (1, 20)]
    found = plan_of(step_of([(1, 24), (1, 4), (1, 3)]))
    assert [found[f"tables_{part}"].shape for part in range(2)] == [(2, 1), (1, 6)]
    found = plan_of(step_of([(2, 8), (2, 8)]))
    assert found["tokens_0"].tolist() == [[0, 1], [2, 3]]


def test_empty_rows_are_skipped():
    step = step_of([(2, 8), (3, 5)])
    step = replace(
        step,
        query_start=np.array([0, 2, 2, 5], np.int32),
        context_len=np.array([8, 4, 5], np.int32),
        block_tables=step.block_tables[[0, 0, 1]],
    )
    found = plan_of(step)
    assert len(set(found["places"].tolist())) == 5


@settings(deadline=None, max_examples=15)
@given(ROWS, WINDOWS)
def test_attention_matches_oracle_for_any_batch(rows, window):
    rng = np.random.default_rng(8)
    step = step_of(rows)
    heads = heads_of(*window)
    blocks = np.arange(len(rows) * 6)
    content = rng.normal(size=(len(blocks), 1, 2, BLOCK, 2, 8)).astype(np.float32)
    q = rng.normal(size=(len(step.positions), 4, 8)).astype(np.float32)
    stale = np.full_like(content, np.nan)  # data of other requests beyond the contexts and before the windows
    for row, (count, context) in enumerate(rows):
        first = max(0, heads.first_key(context - count)) // BLOCK * BLOCK
        for position in range(first, context):
            where = (step.block_tables[row, position // BLOCK], 0, slice(None), position % BLOCK)
            stale[where] = content[where]
    found = []
    for ops, held in ((NumpyOps(), content), (OnnxOps(), stale)):
        cache = ops.allocate_kv(KVShape(1, 2, 8, BLOCK), len(blocks))
        cache.import_blocks(blocks, held)
        found.append(ops.paged_attention(q, cache.layer(0), heads, step))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_write_is_in_place_without_copying():
    ops = OnnxOps()
    cache = ops.allocate_kv(KVShape(1, 1, 2, BLOCK), 3)
    keys, values = layer = cache.layer(0)
    before = layer.ctypes.data
    k, v = np.full((2, 1, 1, 2), [[[[1.0]]], [[[2.0]]]], np.float32)
    ops.write_kv(layer, k, v, np.array([9], np.int32))
    assert cache.layer(0).ctypes.data == before
    assert keys.reshape(-1, 2)[9].tolist() == [1, 1]
    assert values.reshape(-1, 2)[9].tolist() == [2, 2]
    assert keys.sum() == 2
    assert values.sum() == 4


def test_layers_that_share_memory_write_in_place():
    """Only an output has given memory: another write copies all blocks, and loses what was imported meanwhile."""
    graph = Graph()
    cache = TracedCache(graph, KVShape(1, 1, 2, BLOCK))
    k, slots = graph.input("k", np.float32, ["tokens", 1, 2]), graph.input("slots", np.int32, ["tokens"])
    others = graph.input("others", np.int32, ["tokens"])
    for where in (slots, others):
        write(cache.layer(0), k, k, where)
    outputs, layer = cache.outputs(), np.zeros((2, 3, BLOCK, 1, 2), np.float32)
    assert len(outputs) == 4
    values = {"k": np.ones((1, 1, 2), np.float32), "slots": np.array([2], np.int32), "others": np.array([9], np.int32)}
    assert Session(graph, outputs, CPU).bind(bound([layer])).run(values) == ()
    assert np.flatnonzero(layer[0].reshape(-1, 2)[:, 0]).tolist() == [2, 9]
    assert np.flatnonzero(layer[1].reshape(-1, 2)[:, 0]).tolist() == [2, 9]
