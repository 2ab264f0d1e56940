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
PIECE = 16
"""Columns that are always stored whole: not a whole panel."""


@pytest.fixture(scope="module")
def random():
    return np.random.default_rng(17)


@pytest.fixture(params=[1, 3])
def pack(native, request):
    return native("bfloat16", request.param)


@pytest.fixture
def squeezes(pack):
    return pack.instruction_set == "avx512_bf16"


def trained(random, out, inputs):
    """Return weights that are like trained ones: a few are far smaller than the others."""
    weights = random.standard_normal((out, inputs)).astype(np.float32) * 0.05
    weights[random.random(weights.shape) < 2e-4] *= 1e-9
    weights[0, :2] = 0.0, -0.0
    return weights


def linear(pack, weights, biases=None, *, gated=False):
    parts = np.split(weights, 2) if gated else [weights]
    named = None if biases is None else [RawTensor("F32", each) for each in np.split(biases, len(parts))]
    return pack.prepare_linear([RawTensor("F32", part) for part in parts], named, gated=gated)


def in_pieces(pack, x, weights, biases):
    ends = range(0, len(weights), PIECE)
    pieces = [linear(pack, weights[at : at + PIECE], biases[at : at + PIECE]) for at in ends]
    assert not any(piece.squeezed for piece in pieces)
    return np.concatenate([pack.linear(x, piece) for piece in pieces], axis=1)


@pytest.mark.parametrize(("out", "inputs"), SIZES)
def test_products_have_the_bits_of_whole_weights(pack, squeezes, random, out, inputs):
    weights, biases = trained(random, out, inputs), random.standard_normal(out).astype(np.float32)
    stored = linear(pack, weights, biases)
    assert stored.squeezed == squeezes
    for rows in (1, 2, 7, 12, 13, 24, 37):
        x = random.standard_normal((rows, inputs)).astype(np.float32)
        np.testing.assert_array_equal(pack.linear(x, stored), in_pieces(pack, x, weights, biases), f"{rows} rows")


def test_gated_products_have_the_bits_of_whole_weights(pack, squeezes, random):
    weights = trained(random, 2 * 96, 160)
    stored, x = linear(pack, weights, gated=True), random.standard_normal((9, 160)).astype(np.float32)
    assert stored.squeezed == squeezes
    gates, ups = np.split(weights, 2)
    pieces = [np.concatenate([gates[at : at + PIECE], ups[at : at + PIECE]]) for at in range(0, 96, PIECE)]
    expected = [pack.gated_linear(x, linear(pack, piece, gated=True), "silu") for piece in pieces]
    np.testing.assert_array_equal(pack.gated_linear(x, stored, "silu"), np.concatenate(expected, axis=1))


@pytest.mark.soak
def test_libraries_for_any_processor_compute_the_same_bits(pack, squeezes, random):
    """They may not use the instructions of newer processors that put values together faster."""
    if not squeezes:
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
    expected = [in_pieces(pack, x[:, h], head, np.zeros(128, np.float32)) for h, head in enumerate(heads)]
    shape = Heads(3, 1, 64, scale=1.0, rope=no_rope(pack))
    found = pack.expand(x.reshape(5, -1), pack.prepare_heads(heads), shape)
    np.testing.assert_array_equal(found.reshape(5, 3, 128), np.stack(expected, axis=1))


def test_weights_of_all_magnitudes_stay_whole(pack, random):
    bits = random.integers(0, 0x7F00, (128, 64)).astype(np.uint16)
    weights, x = widened(bits), np.ones((3, 64), np.float32)
    stored = linear(pack, weights)
    assert not stored.squeezed
    np.testing.assert_array_equal(pack.linear(x, stored), in_pieces(pack, x, weights, np.zeros(128, np.float32)))


def test_nothing_is_squeezed_of_an_empty_table(pack):
    assert not pack.prepare_embedding(RawTensor("F32", np.zeros((0, 32), np.float32))).squeezed


def test_weights_after_squeezed_ones_are_padded_with_zeros(pack, random):
    """The memory that squeezing leaves belongs to the next weights, whose padding is multiplied as well."""
    linear(pack, trained(random, 640, 400))
    weights, x = trained(random, 20, 33), random.standard_normal((2, 33)).astype(np.float32)
    exact = widened(narrowed(x)) @ widened(narrowed(weights)).T
    np.testing.assert_allclose(pack.linear(x, linear(pack, weights)), exact, rtol=0.02, atol=0.02)
