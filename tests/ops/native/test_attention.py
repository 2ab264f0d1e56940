"""Attention over long contexts split across threads, and quantization of inputs to an int8 cache."""

import ctypes

import numpy as np
import pytest

from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.arrays import Values, assert_near, on_device, step_input
from tests.ops.native.layers import Geometry, LayerOn

SPAN, CHUNK = 512, 40
AROUND = [SPAN - 1, SPAN, SPAN + 1, 2 * SPAN - 1, 2 * SPAN, 2 * SPAN + 1, 3 * SPAN + 40, 9]
SHARED = [1100, 1300, 3 * SPAN, 3 * SPAN + 1, 1700, 4 * SPAN]  # whose first 1,088 tokens are equal
KEPT = [("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8"), ("bfloat16", "int8")]


def layer_on(ops, contexts, kv_dtype="auto", window=None):
    shared = 34 if min(contexts) > 34 * 32 else 0
    sizes = {"heads": 6, "kv_heads": 2, "d": 20, "hidden": 16, "inner": 16, "block_size": 32, "shared_blocks": shared}
    geometry = Geometry(**sizes, window=window, kv_dtype=kv_dtype)
    return LayerOn(ops, geometry, [(1, context) for context in contexts])


def attend(layer, indices, count, ops=None):
    """Return the attention output for the last token of some rows in a step that computes their last `count` tokens."""
    ops, rows = ops or layer.ops, [(min(count, layer.rows[i][1]), layer.rows[i][1]) for i in indices]
    queries = Values(3)(len(layer.rows), CHUNK, layer.g.heads, layer.g.d)
    q = np.concatenate([queries[i, CHUNK - tokens :] for i, (tokens, _) in zip(indices, rows, strict=True)])
    step = on_device(ops, step_input(rows, layer.g.block_size, layer.blocks[indices]))
    found = np.array(ops.to_host(ops.attention(ops.from_host(q), layer.heads, layer.kv, step)), np.float32)
    return found.reshape(len(q), -1)[np.cumsum([tokens for tokens, _ in rows]) - 1]


def compare_bits(native, dtype, kv_dtype, contexts, window, teams):
    layer = layer_on(native(dtype), contexts, kv_dtype, window)
    every = list(range(len(contexts)))
    expected = np.concatenate([attend(layer, [i], 1) for i in every])
    for threads in teams:
        ops = native(dtype, threads)
        for count in (1, 4, CHUNK):  # a decode, a decode with drafts, a prefill chunk
            np.testing.assert_array_equal(attend(layer, every, count, ops), expected)
            alone = [attend(layer, [i], count, ops) for i in every]
            np.testing.assert_array_equal(np.concatenate(alone), expected)


@pytest.mark.parametrize(
    ("contexts", "window"), [(AROUND, None), (SHARED, None), (SHARED, 600)], ids=["around spans", "shared", "window"]
)
@pytest.mark.parametrize(("dtype", "kv_dtype"), KEPT)
def test_long_row_is_bitwise_equal_in_any_batch_and_threads(native, dtype, kv_dtype, contexts, window):
    compare_bits(native, dtype, kv_dtype, contexts, window, (1, 2, 3))


def compare_with_oracle(native, dtype, kv_dtype):
    contexts = [5 * SPAN + 77]
    ours, oracle = (layer_on(ops, contexts, kv_dtype) for ops in (native(dtype, 2), NumpyOps()))
    assert_near(ours.ops, ours.ops.from_host(attend(ours, [0], 1)), attend(oracle, [0], 1))


@pytest.mark.parametrize(("dtype", "kv_dtype"), KEPT)
def test_long_row_matches_oracle(native, dtype, kv_dtype):
    compare_with_oracle(native, dtype, kv_dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_is_seen_from_every_span(native, dtype):
    """It must not be mistaken for a span outside the row's window."""
    layer = layer_on(native(dtype, 2), [3 * SPAN])
    for block in (0, 20, 47):
        blocks = layer.blocks[0, block : block + 1]
        before = layer.cache.export_blocks(blocks)
        keys = before.copy()
        keys[:, 1, 0, 5] = np.nan if dtype == "float32" else 0x7FC0
        layer.cache.import_blocks(blocks, keys)
        assert np.isnan(attend(layer, [0], 1)).all()
        layer.cache.import_blocks(blocks, before)
    assert np.isfinite(attend(layer, [0], 1)).all()


@pytest.fixture(scope="module")
def split_row(compiled):
    """Return `split_row`, compiled separately: [n] float32 to high bytes, low bytes, scale and start."""
    library = compiled(
        '#include "attention/attention_int8.h"\n',
        "void split(const float* x, int count, int half, signed char* bytes, fd::SplitRow* row) {\n"
        "    *row = fd::split_row(x, count, half, bytes);\n}\n",
    )

    def split(x):
        x, half = np.ascontiguousarray(x, np.float32), 64
        split_bytes, row = np.full((2, half), 99, np.int8), np.empty(2, np.float32)
        source, to, made = (ctypes.c_void_p(array.ctypes.data) for array in (x, split_bytes, row))
        library.split(source, len(x), half, to, made)
        assert (split_bytes[:, len(x) :] == 99).all()
        high, low = split_bytes[:, : len(x)].astype(int)
        return high, low, *row

    return split


@pytest.mark.parametrize("size", [1e-28, 1e-3, 1.0, 3e38])
def test_row_is_split_to_nearest_step(split_row, size):
    x = np.random.default_rng(0).uniform(-size, size, 48).astype(np.float32)
    x[5], x[6] = -size, size
    high, low, scale, start = split_row(x)
    assert np.abs(low).max() <= 64
    assert {high[5], high[6]} == {-127, 127} and low[5] == low[6] == 0
    np.testing.assert_allclose((128 * high + low) * np.float64(scale), x, rtol=0, atol=0.501 * size / (127 * 128))
    assert start == -128 * (128 * high + low).sum()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-39, 9e-31])
def test_tiny_row_splits_to_zero(split_row, size):
    high, low, scale, start = split_row(np.full(48, size))
    assert not high.any() and not low.any()
    assert scale < 1e-30 and start == 0


@pytest.mark.parametrize("index", [0, 17, 47])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_row_stays_non_finite(split_row, value, index):
    """All its products must be non-finite, for any bytes."""
    x = np.ones(48)
    x[index] = value
    _, _, scale, start = split_row(x)
    assert np.isnan(start)
    assert not np.isfinite(start * scale)
