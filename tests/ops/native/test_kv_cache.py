import numpy as np
import pytest

from fd_core.ops.contract import KVShape
from fd_core.ops.numpy.ops import NumpyOps

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=10, block_size=5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_round_trip_bitwise(native, dtype):
    cache = native(dtype).allocate_kv(SHAPE, 7)
    rng = np.random.default_rng(0)
    shape = (3, 2, 2, 5, 3, 10)
    bits = rng.integers(0, 2**16, shape).astype(np.uint16)  # every pattern, NaN included
    data = bits if dtype == "bfloat16" else (bits.astype(np.uint32) << 16 | bits).view(np.float32)
    cache.import_blocks(np.array([6, 0, 3], np.int32), data)
    assert cache.export_blocks(np.array([6, 0, 3], np.int32)).tobytes() == data.tobytes()
    assert cache.export_blocks(np.array([3], np.int32)).tobytes() == data[2:].tobytes()


def test_writes_match_oracle_layout(native):
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 9, 3, 10)).astype(np.float32)
    slots = np.array([0, 1, 2, 3, 4, 30, 31, 15, 16], np.int32)
    exported = []
    for ops in (native("float32"), NumpyOps()):
        cache = ops.allocate_kv(SHAPE, 7)
        ops.write_kv(cache.layer(1), *map(ops.from_host, (k, v, slots)))
        exported.append(cache.export_blocks(np.arange(7, dtype=np.int32)))
    np.testing.assert_array_equal(*exported)


def test_invalid_blocks_and_data_are_rejected(native):
    cache = native("float32").allocate_kv(SHAPE, 7)
    with pytest.raises(ValueError, match="expected blocks from 0 to 6"):
        cache.export_blocks(np.array([7], np.int32))
    with pytest.raises(ValueError, match="expected blocks of float32"):
        cache.import_blocks(np.array([1], np.int32), np.zeros((1, 2, 2, 5, 3, 10), np.uint16))
