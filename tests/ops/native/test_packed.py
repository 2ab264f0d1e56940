"""Products with packed weights: equal to the same arithmetic in numpy, and close to dequantized weights."""

from dataclasses import replace

import numpy as np
import pytest

from fd_core.backends.contract import cache_shape
from fd_core.models.families.builtin.gemma import Gemma2
from fd_core.models.families.builtin.llama import Llama
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.contract import Ops
from fd_core.ops.native.pack import NativeOps
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import PackedTensor, RawTensor
from fd_core.runner.inputs.inputs import Spans, build_inputs
from fd_core.testing.models.arrays import float32_of, packed_weight
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.testing.models.layers import Geometry, LayerOn
from tests.ops.native.test_program import model_on

# One library per instruction set is built, which takes seconds.
pytestmark = pytest.mark.slow


def quantized(x):
    """Return rows quantized like the kernels do, to int8 per 32 consecutive values: values and scales."""
    k = x.shape[1]
    x = np.pad(x, ((0, 0), (0, -k % 32))).reshape(len(x), -1, 32)
    largest = np.abs(x).max(2, keepdims=True)
    by = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(x * by), largest / np.float32(127)


def product(parts, x):
    """Return rows times packed weights, exact except for the quantization of the rows."""
    values, scales = quantized(x)
    rows = (values * scales.astype(np.float64)).reshape(len(x), -1)[:, : x.shape[1]]
    return rows @ np.concatenate([part.to_float32() for part in parts]).T.astype(np.float64)


def multiply(ops, parts, x, **options):
    return ops.to_host(ops.linear(x, ops.prepare_linear(parts, **options)))


def rows_of(count, inputs):
    x = np.random.default_rng(4).standard_normal((count, inputs)).astype(np.float32)
    x[:, ::37] *= 9  # outliers
    x[0, :32] = 0
    return x


@pytest.mark.parametrize("kind", sorted(NativeOps.weight_formats))
def test_every_format_equals_numpy_arithmetic(native, kind):
    parts, x = [packed_weight(kind, 75, 768)], rows_of(9, 768)
    found, expected = multiply(native(), parts, x), product(parts, x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["Q4_K", "int8"])
def test_scales_beyond_half_precision_are_exact(native, kind):
    weight, x = packed_weight(kind, 75, 768), rows_of(3, 768)
    minima = None if weight.minima is None else weight.minima * np.float32(1e6 / 3)
    part = PackedTensor(kind, weight.bits, weight.values, weight.scales * np.float32(1e6 / 3), minima)
    found, expected = multiply(native(), [part], x), product([part], x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(1, 32), (16, 32), (33, 96), (70, 64), (5, 1024)])
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_any_shape(native, kind, shape):
    parts, x = [packed_weight(kind, *shape)], rows_of(13, shape[1])
    found, expected = multiply(native(), parts, x), product(parts, x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("group", [16, 32, 96, 192, 48, 24])
@pytest.mark.parametrize("kind", ["int8", "int4", "gptq"])
def test_any_group(native, kind, group):
    """Groups of 24 and 48 are dequantized."""
    parts, x = [packed_weight(kind, 40, 192, group)], rows_of(9, 192)
    found = multiply(native(), parts, x)
    expected = x @ parts[0].to_float32().T if group in (24, 48) else product(parts, x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("inputs", [8, 40, 72, 100])
def test_per_row_scales_allow_any_length(native, inputs):
    parts, x = [packed_weight("int8", 40, inputs)], rows_of(5, inputs)
    expected = product(parts, x)
    np.testing.assert_allclose(multiply(native(), parts, x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q4_0", "Q4_1"), ("int8", "Q8_0"), ("gptq", "Q4_1")])
def test_fused_parts_may_mix_formats(native, kinds):
    parts, x = [packed_weight(kind, out, 256) for kind, out in zip(kinds, (37, 23), strict=True)], rows_of(7, 256)
    biases = [np.arange(out, dtype=np.float32) for out in (37, 23)]
    expected = product(parts, x) + np.concatenate(biases)
    found = multiply(native(), parts, x, biases=[RawTensor("F32", bias) for bias in biases])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kinds", [("Q4_K",), ("Q6_K",), ("Q4_K", "Q6_K"), ("Q5_K", "Q5_K")])
@pytest.mark.parametrize("rows", [1, 40])
def test_scales_are_the_same_as_multiples_of_units(native, kinds, rows):
    parts, x = [packed_weight(kind, 37, 768) for kind in kinds], rows_of(rows, 768)
    whole = [replace(part, units=None) for part in parts]
    bytes_of = {"Q4_K": 0.578125, "Q5_K": 0.828125, "Q6_K": 0.8203125}
    assert [part.nbytes / part.values.size for part in parts] == [bytes_of[kind] for kind in kinds]
    np.testing.assert_array_equal(multiply(native(), parts, x), multiply(native(), whole, x))
    halves = [part.take_columns(slice(0, 384)) for part in parts]
    assert [part.units for part in halves] == [None] * len(parts)
    cut = [part.take_columns(slice(256, 768)) for part in parts]
    expected = product(cut, x[:, 256:])
    np.testing.assert_allclose(
        multiply(native(), cut, x[:, 256:]), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_rows_of_a_table_are_the_same_with_units(native, kind):
    table, ids = packed_weight(kind, 70, 512), np.array([0, 69, 33], np.int32)
    ops = native()
    found = ops.to_host(ops.embedding(ops.prepare_embedding(table), ops.from_host(ids)))
    np.testing.assert_array_equal(found, table.to_float32()[ids])


def test_packed_part_is_dequantized_next_to_an_unpacked_one(native):
    packed, x = packed_weight("Q4_0", 24, 64), rows_of(3, 64)
    found = multiply(native(), [packed, RawTensor("F32", packed.to_float32())], x)
    expected = x @ packed.to_float32().T
    np.testing.assert_allclose(found, np.hstack([expected, expected]), rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_0"), ("Q8_0", "Q8_0"), ("Q4_K", "Q6_K")])
def test_gate_and_up(native, kinds):
    ops = native()
    gate, up = (packed_weight(kind, 45, 256, scale=0.02) for kind in kinds)
    x = rows_of(4, 256)
    biases = [RawTensor("F32", np.linspace(-1, 1, 45, dtype=np.float32))] * 2
    weight = ops.prepare_linear([gate, up], biases, gated=True)
    found = ops.to_host(ops.gated_linear(x, weight, "silu"))
    g, u = (product([part], x) + biases[0].data for part in (gate, up))
    expected = g / (1 + np.exp(-g)) * u
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", sorted(NativeOps.weight_formats))
def test_every_format_is_close_to_dequantized_weights(native, kind):
    """Quantizing the activations costs less than 1% of a result on average."""
    parts, x = [packed_weight(kind, 75, 768)], np.random.default_rng(1).standard_normal((9, 768)).astype(np.float32)
    exact = x @ parts[0].to_float32().T
    error = multiply(native(), parts, x) - exact
    assert np.sqrt((error**2).mean()) < 0.01 * exact.std()


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q6_K", "int8"])
@pytest.mark.in_turn(2)
def test_row_is_bitwise_equal_in_any_batch(native, kind):
    ops, x = native(threads=2), rows_of(71, 512)
    weight = ops.prepare_linear([packed_weight(kind, 100, 512)])
    together = ops.to_host(ops.linear(x, weight))
    for count in (1, 2, 3, 5, 7, 12, 23, 39):
        pieces = [ops.to_host(ops.linear(x[i : i + count], weight)) for i in range(0, 71, count)]
        np.testing.assert_array_equal(np.concatenate(pieces), together)


def test_non_finite_values_stay_in_their_own_row(native):
    parts, x = [packed_weight("Q4_1", 40, 128)], rows_of(4, 128)
    right = multiply(native(), parts, x)
    x[1, 70], x[3, 5] = np.nan, np.inf
    found = multiply(native(), parts, x)
    assert not np.isfinite(found[1]).any()
    assert not np.isfinite(found[3]).any()
    np.testing.assert_array_equal(found[[0, 2]], right[[0, 2]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [{}, {"experts": 5, "shared_expert": True}], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_fused_operations_with_packed_weights(native, kind, layer, dtype):
    """Norms before and after, residuals, gates and experts work with packed weights."""
    geometry = Geometry(hidden=64, inner=96, packed=kind, post_norm=True, **layer)
    found, expected = LayerOn(native(dtype, 2), geometry), LayerOn(NumpyOps(), geometry)
    results = found.run(found.ops)
    right = expected.run(Ops, results, float32_of(found.exported()))
    if layer:  # rounding may change the choice of other tokens
        decided = expected.decided(expected.ops.rms_norm(results[2], expected.norm), 0.1)
        results[3], right[3] = results[3][decided], right[3][decided]
    for ours, theirs in zip(results, right, strict=True):
        error = np.abs(ours.reshape(theirs.shape) - theirs)
        assert error.max() < 0.05 * np.abs(theirs).max()
        assert error.mean() < 0.005 * np.abs(theirs).max()


def test_recorded_forward_equals_eager_operations(native):
    layer = LayerOn(native(threads=2), Geometry(hidden=64, inner=96, packed="Q5_1"))
    compiled, forward = layer.ops.compile(model_on(layer)), model_on(layer)
    replayed, once = (layer.ops.to_host(run(layer.step, layer.cache)) for run in (compiled, forward))
    # The softcap uses numpy's tanh in one and the kernels' tanh in the other.
    np.testing.assert_allclose(replayed, once, rtol=0, atol=1e-5)


def test_view_is_packed_by_its_logical_layout(native):
    whole, x = packed_weight("Q5_1", 80, 128), rows_of(3, 128)
    every_other = PackedTensor("Q5_1", 5, whole.values[::2], whole.scales[::2], whole.minima[::2])
    np.testing.assert_array_equal(multiply(native(), [every_other], x), multiply(native(), [whole], x)[:, ::2])


@pytest.mark.parametrize(("family", "dtype"), [(Llama, "float32"), (Llama, "bfloat16"), (Gemma2, "bfloat16")])
def test_logits_are_the_same_with_and_without_hidden_states(native, family, dtype, tmp_path):
    """A head for drafts reads those of every step, and a request for scores of its prompt those of its own."""
    ops, count, zero = native(dtype), 7, np.zeros(1, np.int32)
    named = {"architectures": list(family.architectures), "final_logit_softcapping": 5.0}
    write_config({**family.defaults, **SIZES, **next(iter(family.cases.values())), **named}, tmp_path, seed=4)
    with open_checkpoint(tmp_path) as checkpoint:
        model = load_model(checkpoint, ops, 32, quantization="int8")
    spans = Spans(zero, zero, np.array([count], np.int32), logits_rows=np.arange(count, dtype=np.int32))
    tokens, table = np.arange(5, 5 + count, dtype=np.int32)[None], np.arange(2, dtype=np.int32)[None, None]
    step, shape = build_inputs(spans, tokens, table, 4, ops), cache_shape(model, 4, "auto")
    logits = ops.compile(model.forward)(step, ops.allocate_kv(shape, 2))
    states = ops.compile_states(model.states)(step, ops.allocate_kv(shape, 2))
    np.testing.assert_array_equal(model.head(states), logits)
