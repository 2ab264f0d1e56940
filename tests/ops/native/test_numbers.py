"""NaN, infinities and denormals: equal on each instruction set, in vector code and scalar tails."""

import ctypes
import math

import numpy as np
import pytest
import torch

from fd_core.ops.contract import KVShape, Norm
from fd_core.ops.numpy.kv_8bit import quantize_kv
from fd_core.testing.models.arrays import on_device, raw, sample_input
from tests.ops.native.layers import Geometry, LayerOn

NAN, INF = np.float32(np.nan), np.float32(np.inf)
TINY = np.float32(2.0**-126)


@pytest.fixture(scope="module")
def numbers(compiled):
    """Return functions of the vector code, by name: [n] float32 to [n], where n is a multiple of 16."""
    each = {
        "exp2_": "vexp2(vload(x + i))",
        "tanh_": "vtanh(vload(x + i))",
        "gelu_": "activate(vload(x + i), Activation::gelu)",
    }
    vectors = {
        **{name: ("float", "float", f"vstore(y + i, {value})") for name, value in each.items()},
        "round_": ("float", "bf16", "vstore(y + i, vload(x + i))"),
        "bytes_": ("float", "int8_t", "store_rounded(y + i, vload(x + i))"),
        "half_": ("uint16_t", "float", "vstore(y + i, vload_half(x + i))"),
    }
    scalars = {
        "round_each": ("float", "bf16", "put(y + i, x[i])"),
        "half_each": ("uint16_t", "float", "y[i] = half_to_float(x[i])"),
    }
    library = compiled(
        '#include "base/dot.h"\n#include "base/rows.h"\nusing namespace fd;\n',
        "".join(
            f"void {name}(const {of}* x, int n, {to}* y) {{ for (int i = 0; i < n; i += {step}) {body}; }}\n"
            for functions, step in ((vectors, "kLanes"), (scalars, "1"))
            for name, (of, to, body) in functions.items()
        ),
    )

    def call(name, x, dtype=np.float32):
        x, y = np.ascontiguousarray(x), np.empty(len(x), dtype)
        getattr(library, name)(ctypes.c_void_p(x.ctypes.data), len(x), ctypes.c_void_p(y.ctypes.data))
        return y

    return call


def padded(*values):
    return np.resize(np.array(values, np.float32), 16)


def test_powers_of_two(numbers):
    x = np.linspace(-160, 140, 16 * 1000).astype(np.float32)
    right = np.exp2(x.astype(np.float64))
    found = numbers("exp2_", x)
    with np.errstate(over="ignore"):
        overflown = np.isinf(right.astype(np.float32))
    assert np.isinf(found[overflown]).all()
    np.testing.assert_allclose(found[~overflown], right[~overflown], rtol=3e-7, atol=2.0**-149)
    assert numbers("exp2_", padded(NAN, -NAN, INF, -INF, -151, 3e38, -3e38, -130)).tolist()[2:8] == [
        np.inf,
        0.0,
        0.0,
        np.inf,
        0.0,
        pytest.approx(2.0**-130, abs=2.0**-149),
    ]
    assert np.isnan(numbers("exp2_", padded(NAN, -NAN))).all()


def test_tanh_keeps_nan_and_saturates(numbers):
    found = numbers("tanh_", padded(NAN, INF, -INF, 1e30, -1e30))
    np.testing.assert_array_equal(found[:5], np.array([NAN, 1, -1, 1, -1], np.float32))


def test_gelu_is_near_and_saturates(numbers):
    x = np.linspace(-14, 14, 16 * 1000).astype(np.float32)
    right = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    np.testing.assert_allclose(numbers("gelu_", x), right, rtol=1.2e-7, atol=1e-7)
    found = numbers("gelu_", padded(NAN, INF, -INF, 3e38, -3e38))
    np.testing.assert_array_equal(found[:5], np.array([NAN, INF, 0, 3e38, 0], np.float32))


def test_bfloat16_rounds_to_nearest_and_keeps_nan(numbers):
    bits = np.random.default_rng(0).integers(0, 2**32, 2**14, np.uint32)
    bits[:8] = 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0x00000001, 0x80008000, 0x3F808000, 0x3F818000, 0x007FFFFF
    x = bits.view(np.float32)
    found = numbers("round_", x, np.uint16)
    np.testing.assert_array_equal(found, numbers("round_each", x, np.uint16))
    right, nan = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16), np.isnan(x)
    np.testing.assert_array_equal(found[~nan], right[~nan])
    np.testing.assert_array_equal(found[nan], (bits[nan] >> 16) | 0x40)


def test_every_float16_converts_exactly(numbers):
    halves = np.arange(2**16, dtype=np.uint16)
    found = numbers("half_", halves)
    np.testing.assert_array_equal(found, halves.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(found.view(np.uint32), numbers("half_each", halves).view(np.uint32))


def test_rounding_to_bytes(numbers):
    found = numbers("bytes_", padded(-127, 127, 0.5, 1.5, -2.5, NAN, -NAN, 126.4), np.int8)
    assert found[:8].tolist() == [-127, 127, 0, 2, -2, -128, -128, 126]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_activations_propagate_nan_in_its_row(native, activation, dtype):
    ops = native(dtype)
    weight = ops.prepare_linear([raw(np.eye(40, dtype=np.float32))] * 2, gated=True)
    x = np.ones((3, 40), np.float32)
    x[1, 7] = float("nan")
    found = ops.to_host(ops.gated_linear(x, weight, activation))
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softcap_propagates_nan_logits(native, dtype):
    ops = native(dtype)
    table = ops.prepare_embedding(raw(np.array([[1] * 24, [np.nan] * 24], np.float32)))
    head = ops.prepare_linear([raw(np.ones((50, 24), np.float32))])
    norm = Norm(ops.prepare_vector(np.ones(24, np.float32)), 1e-6)
    layer = LayerOn(ops, Geometry(), [(1, 1)] * 2)
    layer.step.token_ids[:] = 0, 1
    forward = ops.compile(
        lambda step, cache: ops.logits(ops.embedding(table, step.token_ids), norm, head, step.logits_rows, 30.0)
    )
    found = ops.to_host(forward(layer.step, layer.cache))
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routing_propagates_nan_in_its_row(native, dtype):
    layer = LayerOn(native(dtype, 2), Geometry(experts=5), [(1, 1)] * 4)
    right = layer.run(layer.ops)[-1].copy()
    layer.x[2, 3] = np.nan
    found = layer.run(layer.ops)[3]
    assert np.isnan(found[2]).all()
    assert np.isfinite(found[[0, 1, 3]]).all()
    assert np.isfinite(right).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF, np.float32(1e-45), np.float32(3e38), np.float32(0)])
def test_int8_keys_match_oracle_for_any_value(native, value):
    ops = native()
    x = np.random.default_rng(2).standard_normal((3, 2, 20)).astype(np.float32)
    x[1, 1, 5] = value
    x[2, 0] = value
    cache = ops.allocate_kv(KVShape(1, 2, 20, 4, "int8"), 2)
    ops.write_kv(cache.layer(0), x, x, np.array([0, 1, 2], np.int32))
    with np.errstate(all="ignore"):
        right = quantize_kv(x)
    found = cache.export_blocks(np.array([0], np.int32))[0, 0, 0, :3]
    np.testing.assert_array_equal(found[..., :20], right[..., :20])
    scales = [array[..., 20:].copy().view(np.float32) for array in (found, right)]
    np.testing.assert_array_equal(*scales)


@pytest.mark.parametrize("index", [0, 15, 16, 40, 69])
def test_nan_logit_is_reported_and_never_sampled(native, index):
    ops, logits = native(), np.tile(np.arange(70, dtype=np.float32), (2, 1))
    logits[1, index] = float("nan")
    tokens, peaks = ops.sample(logits, on_device(ops, sample_input(2, temperature=0.0)))
    assert tokens.tolist() == [69, 68 if index == 69 else 69]
    assert peaks[0] == 69 and np.isnan(peaks[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_denormals_are_kept_in_any_fpu_mode(native, threads):
    """Otherwise a row's result would depend on the computing thread."""
    ops = native(threads=threads)
    weight = ops.prepare_linear([raw(np.eye(64, dtype=np.float32))])
    x = np.full((5, 64), TINY / 4, np.float32)
    expected = x.copy()
    try:
        assert torch.set_flush_denormal(True)
        found = ops.linear(x, weight)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(found, expected)
