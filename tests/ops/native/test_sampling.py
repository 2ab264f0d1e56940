"""Sampling and masks on two threads; the kit's cases in test_kit.py run on one."""

import numpy as np
import pytest

from fd_core.ops.numpy.ops import NumpyOps
from tests.ops.test_sampling import test_a_large_vocabulary_with_every_filter

__all__ = ["test_a_large_vocabulary_with_every_filter"]


@pytest.fixture
def ops(native):
    return native(threads=2)


@pytest.mark.parametrize("vocabulary", [5, 32, 100, 5003])
def test_masks_match_oracle(ops, vocabulary):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((20, vocabulary)).astype(np.float32)
    rows = rng.permutation(20)[:9].astype(np.int32)
    bits = rng.integers(-(2**31), 2**31, (9, -(-vocabulary // 32)), dtype=np.int32)
    found = ops.to_host(ops.mask_logits(*map(ops.from_host, (logits.copy(), rows, bits))))
    np.testing.assert_array_equal(found, NumpyOps().mask_logits(logits.copy(), rows, bits))
