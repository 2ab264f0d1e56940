"""Arrays are uploaded in one copy, and fetched with one wait."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402 - only where torch is installed
from hypothesis import strategies as st  # noqa: E402
from processor import Processor, make_ops  # noqa: E402

from fd_gpu_cuda.device import ALIGNMENT  # noqa: E402

DTYPES = (np.int32, np.float32, np.uint64, np.int64, np.uint8, np.bool_, np.float64)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=3)), max_size=8))
def test_arrays_of_any_dtype_arrive_bit_for_bit_in_one_aligned_copy(
    wanted: list[tuple[type[np.generic], list[int]]],
) -> None:
    processor = Processor()
    ops, rng = make_ops(processor), np.random.default_rng(1)
    arrays = [rng.integers(0, 256, shape).astype(dtype) for dtype, shape in wanted]
    before = processor.uploads
    found = ops.upload(arrays)
    assert processor.uploads == before + 1
    for array, tensor in zip(arrays, found, strict=True):
        assert tensor.shape == array.shape and tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        np.testing.assert_array_equal(tensor.numpy().astype(array.dtype), array)


def test_largest_seed_keeps_its_bits() -> None:
    (seed,) = make_ops().upload([np.array([2**64 - 1], np.uint64)])
    assert seed.dtype == torch.int64 and seed.tolist() == [-1]


def test_non_contiguous_array_is_packed_in_its_order() -> None:
    turned = np.arange(6, dtype=np.int32).reshape(2, 3).T
    (found,) = make_ops().upload([turned])
    assert found.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_queued_copies_hold_the_values_at_queue_time() -> None:
    processor = Processor()
    ops = make_ops(processor)
    x = ops.from_host(np.array([1, 2], np.int32))
    copies = ops.fetch_later([x, x.to(torch.bfloat16)])
    x.fill_(9)
    assert not copies.ready() and copies.ready() and processor.waits == 0
    for _ in range(2):
        first, second = copies.wait()
        assert first.tolist() == [1, 2] and second.tolist() == [1.0, 2.0] and second.dtype == np.float32
