import numpy as np
import pytest
from hypothesis import given, settings

from fd_core.ops.numpy.ops import NumpyOps
from tests.ops.packs import on_device, sample_input
from tests.ops.test_sampling import situations


def sample(ops, logits, parameters):
    tokens, _ = ops.sample(ops.from_host(logits.copy()), on_device(ops, parameters))
    return ops.to_host(tokens)


@given(situations())
@settings(max_examples=200, deadline=None)
def test_samples_match_oracle(native, situation):
    logits, parameters = situation
    np.testing.assert_array_equal(sample(native(), logits, parameters), sample(NumpyOps(), logits, parameters))


@pytest.mark.parametrize("threads", [1, 2])
def test_real_vocabulary_with_all_filters(native, threads):
    rng = np.random.default_rng(0)
    rows = 48
    logits = (rng.standard_normal((rows, 5003)) * rng.choice([0.1, 1.0, 4.0], (rows, 1))).astype(np.float32)
    parameters = sample_input(
        rows,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5], rows),
        top_k=rng.choice([0, 1, 40, 4000], rows),
        top_p=rng.choice([0.1, 0.9, 0.999, 1.0], rows),
        min_p=rng.choice([0.0, 0.01, 0.3], rows),
        seeds=rng.integers(0, 2**63, rows),
        positions=rng.integers(0, 4000, rows),
    )
    expected = sample(NumpyOps(), logits, parameters)
    np.testing.assert_array_equal(sample(native(threads=threads), logits, parameters), expected)


def test_greedy_tie_takes_lowest_id(native):
    logits = np.full((2, 70), -1.0, np.float32)
    logits[0, [40, 69]] = 5.0
    assert sample(native(), logits, sample_input(2, temperature=0.0)).tolist() == [40, 0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocabulary", [5, 32, 100, 5003])
def test_masks_match_oracle(native, vocabulary, threads):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((20, vocabulary)).astype(np.float32)
    rows = rng.permutation(20)[:9].astype(np.int32)
    bits = rng.integers(-(2**31), 2**31, (9, -(-vocabulary // 32)), dtype=np.int32)
    ops = native(threads=threads)
    found = ops.to_host(ops.mask_logits(*map(ops.from_host, (logits.copy(), rows, bits))))
    np.testing.assert_array_equal(found, NumpyOps().mask_logits(logits.copy(), rows, bits))
