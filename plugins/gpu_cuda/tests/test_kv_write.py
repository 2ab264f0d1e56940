"""Writing keys and values: the kernel in Triton's interpreter, the composition, and copies of 8-bit blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_core.ops.contract import KVShape  # noqa: E402 - only where both are installed
from fd_core.ops.numpy.ops import NumpyOps  # noqa: E402
from fd_core.testing.models.arrays import Values  # noqa: E402
from processor import Processor, make_ops  # noqa: E402

from fd_gpu_cuda.kernels.heads import write_kv  # noqa: E402

BLOCKS, SIZE = 12, 16


def written(ops: Any, shape: KVShape, k: Any, v: Any, slots: Any, write: Any = None) -> Any:
    """Return all blocks of layer 1 in canonical order."""
    cache = ops.allocate_kv(shape, BLOCKS)
    k, v, slots = map(ops.from_host, (k, v, slots))
    if write is None:
        ops.write_kv(cache.layer(1), k, v, slots)
    else:
        write(k, v, cache.layer(1), slots)
    return cache.export_blocks(np.arange(BLOCKS, dtype=np.int32))


@pytest.mark.parametrize("write", [write_kv, None], ids=["kernel", "composition"])
@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(("nkv", "d"), [(1, 64), (3, 80), (8, 128), (2, 256), (3, 7)])
def test_blocks_match_the_oracle_bit_for_bit(nkv: int, d: int, dtype: str, write: Any) -> None:
    """For all magnitudes, with heads of zeros and with values halfway between two steps."""
    rng, tokens = np.random.default_rng(nkv * d), 37
    sizes = (10.0 ** rng.integers(-30, 30, (2, tokens, nkv, 1))).astype(np.float32)
    k, v = (Values(side)(tokens, nkv, d) * sizes[side] for side in (0, 1))
    k[3], v[5, 0], v[6, :, 1:] = 0, 0, 0
    k[7] = (rng.integers(-127, 127, (nkv, d)) + 0.5).astype(np.float32)
    k[7, :, 0] = 127
    k[8] = (rng.integers(-20, 20, (nkv, d)) / 2.0**10).astype(np.float32)  # multiples of 2^-9 and between two
    k[9], k[10, :, :3] = (rng.integers(128, 272, (nkv, d)) / 8).astype(np.float32), (-0.0, 464.0, -1e9)
    slots = rng.permutation(BLOCKS * SIZE)[:tokens].astype(np.int32)
    shape = KVShape(2, nkv, d, SIZE, dtype)
    expected = written(NumpyOps(), shape, k, v, slots)
    np.testing.assert_array_equal(written(make_ops(), shape, k, v, slots, write), expected)


@pytest.mark.parametrize("write", [write_kv, None], ids=["kernel", "composition"])
def test_nan_and_inf_are_stored_as_nan(write: Any) -> None:
    k = np.ones((3, 2, 64), np.float32)
    k[0, 0, 5], k[1, 1, 7] = np.nan, np.inf
    fp8 = written(make_ops(), KVShape(2, 2, 64, SIZE, "fp8"), k, k, np.arange(3, dtype=np.int32), write)
    np.testing.assert_array_equal((fp8[0, 1, 0, :3] & 127) == 127, ~np.isfinite(k))  # NaN with either sign
    blocks = written(make_ops(), KVShape(2, 2, 64, SIZE, "int8"), k, k, np.arange(3, dtype=np.int32), write)
    scales = np.ascontiguousarray(blocks[0, 1, 0, :3, :, -4:]).view("<f4")[..., 0]
    np.testing.assert_array_equal(np.isfinite(scales), [[False, True], [True, False], [True, True]])


def test_fp8_needs_a_device_that_converts_it() -> None:
    ada = Processor()
    ada.multiplies_fp8 = True
    assert [make_ops(device).kv_dtypes for device in (ada, Processor())] == [("int8", "fp8"), ("int8",)]


def test_heads_are_read_in_place_from_one_product() -> None:
    """Queries, keys and values are adjacent in the output of a projection."""
    qkv, slots = torch.from_numpy(Values(4)(9, 8 * 64)), torch.arange(9, dtype=torch.int32)
    k, v = qkv[:, 4 * 64 : 6 * 64].unflatten(1, (2, 64)), qkv[:, 6 * 64 :].unflatten(1, (2, 64))
    layer = make_ops().allocate_kv(KVShape(1, 2, 64, SIZE), BLOCKS).layer(0)
    write_kv(k, v, layer, slots)
    assert torch.equal(layer.keys[:9], k)
    assert torch.equal(layer.values[:9], v)


def test_8_bit_blocks_are_restored_without_touching_others() -> None:
    rng, shape = np.random.default_rng(3), KVShape(3, 2, 24, 4, "int8")
    cache = make_ops(Processor()).allocate_kv(shape, BLOCKS)
    every = np.arange(BLOCKS, dtype=np.int32)
    before = rng.integers(-128, 128, (BLOCKS, 3, 2, 4, 2, 28)).astype(np.int8)
    cache.import_blocks(every, before)
    np.testing.assert_array_equal(cache.export_blocks(every[::-1]), before[::-1])
    cache.import_blocks(np.array([7, 2], np.int32), before[[0, 1]])
    before[[7, 2]] = before[[0, 1]]
    np.testing.assert_array_equal(cache.export_blocks(every), before)
