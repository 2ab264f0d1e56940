"""Weights of bfloat16 in 12 bits: the same bits as of weights that are stored whole."""

import numpy as np
import pytest

from fd_core.ops.contract import Heads
from fd_core.ops.native import build
from fd_core.ops.native.library import declare
from fd_core.ops.native.pack import NativeOps
from fd_core.ops.native.program import narrowed, widened
from fd_core.ops.weights import RawTensor
from fd_core.testing.models.arrays import no_rope

SIZES = [(64, 32), (128, 64), (192, 1000), (576, 576), (64, 4)]
UNALIGNED = [(64, 33), (64, 34), (8, 64), (72, 64)]
SQUEEZING = ("avx512_bf16", "avx512")


@pytest.fixture
def random():
    """Return numbers that do not depend on which tests ran before: of small weights not all draws can be squeezed."""
    return np.random.default_rng(17)


@pytest.fixture(params=[1, 3])
def pack(native, request):
    return native("bfloat16", request.param)


@pytest.fixture
def squeezes(pack):
    return pack.instruction_set in SQUEEZING


def trained(random, out, inputs):
    """Return weights that are like trained ones: a few are far smaller than the others."""
    weights = random.standard_normal((out, inputs)).astype(np.float32) * 0.05
    weights[random.random(weights.shape) < 2e-4] *= 1e-9
    weights[0, :2] = 0.0, -0.0
    return weights


def wild(random, out, inputs):
    """Return weights of all magnitudes, beside which others are stored whole."""
    return widened(random.integers(0, 0x7F00, (out, inputs)).astype(np.uint16))


def linear(pack, weights, biases=None, *, gated=False):
    parts = np.split(weights, 2) if gated else [weights]
    named = None if biases is None else [RawTensor("F32", each) for each in np.split(biases, len(parts))]
    return pack.prepare_linear([RawTensor("F32", part) for part in parts], named, gated=gated)


def stored_whole(pack, random, weights, biases=None, *, gated=False):
    """Return the linear of these weights, followed by as many wild columns."""
    parts = [each for part in np.split(weights, 2 if gated else 1) for each in (part, wild(random, *part.shape))]
    followed = None if biases is None else np.concatenate([biases, np.zeros_like(biases)])
    stored = linear(pack, np.concatenate(parts), followed, gated=gated)
    assert not stored.squeezed
    return stored


def exact(pack, random, x, weights, biases=None):
    return pack.linear(x, stored_whole(pack, random, weights, biases))[:, : len(weights)]


@pytest.mark.parametrize(("out", "inputs"), SIZES)
def test_products_have_the_bits_of_whole_weights(pack, squeezes, random, out, inputs):
    weights, biases = trained(random, out, inputs), random.standard_normal(out).astype(np.float32)
    stored = linear(pack, weights, biases)
    assert stored.squeezed == squeezes
    for rows in (1, 2, 7, 12, 13, 24, 37):
        x = random.standard_normal((rows, inputs)).astype(np.float32)
        expected = exact(pack, random, x, weights, biases)
        np.testing.assert_array_equal(pack.linear(x, stored), expected, f"{rows} rows")


@pytest.mark.parametrize(("out", "inputs"), UNALIGNED)
def test_products_of_unaligned_sizes_have_the_same_bits(pack, random, out, inputs):
    weights, x = trained(random, out, inputs), random.standard_normal((13, inputs)).astype(np.float32)
    found = pack.linear(x, linear(pack, weights))
    np.testing.assert_array_equal(found, exact(pack, random, x, weights))


@pytest.mark.parametrize("columns", [slice(0, 1), slice(50, 51), slice(0, 192, 8), slice(16, 192, 32)])
def test_rare_units_are_multiplied_in_their_order(pack, squeezes, random, columns):
    """The first, adjacent and the last units of one panel, of each or of every other."""
    weights = random.standard_normal((192, 512)).astype(np.float32) * 0.05
    weights[columns, 0] = weights[columns, 5] = weights[columns, 9] = weights[columns, 511] = 1e-20
    stored = linear(pack, weights)
    assert stored.squeezed == squeezes
    for rows in (1, 2, 3, 6, 7, 12, 13, 30):
        x = random.standard_normal((rows, 512)).astype(np.float32)
        np.testing.assert_array_equal(pack.linear(x, stored), exact(pack, random, x, weights), f"{rows} rows")


def test_gated_products_have_the_bits_of_whole_weights(pack, squeezes, random):
    weights = trained(random, 2 * 96, 160)
    stored, x = linear(pack, weights, gated=True), random.standard_normal((9, 160)).astype(np.float32)
    assert stored.squeezed == squeezes
    expected = pack.gated_linear(x, stored_whole(pack, random, weights, gated=True), "silu")
    np.testing.assert_array_equal(pack.gated_linear(x, stored, "silu"), expected[:, :96])


@pytest.mark.soak
def test_libraries_for_any_processor_compute_the_same_bits(pack, random):
    """They may not use the instructions of newer processors that put values together faster."""
    if pack.instruction_set != "avx512_bf16":
        pytest.skip("needs the bfloat16 instructions of AVX-512")
    portable = NativeOps(declare(build.load("avx512_bf16")), "bfloat16", 1)
    weights, x = trained(random, 192, 1000), random.standard_normal((13, 1000)).astype(np.float32)
    found = portable.linear(x, linear(portable, weights))
    np.testing.assert_array_equal(found, pack.linear(x, linear(pack, weights)))


def test_rows_of_a_table_are_those_that_were_stored(pack, squeezes, random):
    table = trained(random, 320, 100)
    stored, ids = pack.prepare_embedding(RawTensor("F32", table)), np.array([0, 1, 33, 318, 319], np.int32)
    assert stored.squeezed == squeezes
    np.testing.assert_array_equal(pack.embedding(stored, ids), widened(narrowed(table))[ids])


def test_heads_are_multiplied_like_the_linears_that_they_are(pack, random):
    heads = np.stack([trained(random, 128, 64) for _ in range(3)])
    x = random.standard_normal((5, 3, 64)).astype(np.float32)
    expected = [exact(pack, random, x[:, h], head) for h, head in enumerate(heads)]
    shape = Heads(3, 1, 64, scale=1.0, rope=no_rope(pack))
    found = pack.expand(x.reshape(5, -1), pack.prepare_heads(heads), shape)
    np.testing.assert_array_equal(found.reshape(5, 3, 128), np.stack(expected, axis=1))


def test_weights_of_all_magnitudes_stay_whole(pack, random):
    assert not linear(pack, wild(random, 128, 64)).squeezed


def test_nothing_is_squeezed_of_an_empty_table(pack):
    assert not pack.prepare_embedding(RawTensor("F32", np.zeros((0, 32), np.float32))).squeezed


def test_weights_after_squeezed_ones_are_padded_with_zeros(pack, random):
    """The memory that squeezing leaves belongs to the next weights, whose padding is multiplied as well."""
    linear(pack, trained(random, 640, 400))
    weights, x = trained(random, 20, 33), random.standard_normal((2, 33)).astype(np.float32)
    exact = widened(narrowed(x)) @ widened(narrowed(weights)).T
    np.testing.assert_allclose(pack.linear(x, linear(pack, weights)), exact, rtol=0.02, atol=0.02)
