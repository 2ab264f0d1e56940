import numpy as np
import pytest

from fd_core.ops.contract import KVShape
from fd_core.ops.numpy.ops import NumpyOps

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=10, block_size=5)
SHAPES = {
    "odd": SHAPE,
    "many tokens": KVShape(num_layers=1, num_kv_heads=2, head_dim=16, block_size=35),
    "int8": KVShape(num_layers=2, num_kv_heads=3, head_dim=10, block_size=18, dtype="int8"),
    "latent": KVShape(num_layers=2, num_kv_heads=1, head_dim=15, block_size=17, latent=12),
    "latent int8": KVShape(num_layers=2, num_kv_heads=1, head_dim=14, block_size=6, latent=8, dtype="int8"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_round_trip_bitwise(native, dtype, shape):
    cache = native(dtype).allocate_kv(shape, 7)
    blocks = np.array([6, 0, 3], np.int32)
    element = np.dtype(np.int8 if shape.quantized else {"float32": np.float32, "bfloat16": np.uint16}[dtype])
    size = element.itemsize * np.prod(cache.export_blocks(blocks).shape)
    data = np.random.default_rng(0).bytes(size)  # every pattern, NaN included
    data = np.frombuffer(data, element).reshape(3, *shape.block_sizes)
    cache.import_blocks(blocks, data)
    assert cache.export_blocks(blocks).tobytes() == data.tobytes()
    assert cache.export_blocks(blocks[2:]).tobytes() == data[2:].tobytes()
    assert not cache.export_blocks(np.array([1, 2, 4, 5], np.int32)).any(), "blocks that were not named changed"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_writes_match_oracle_layout(native, shape):
    rng = np.random.default_rng(1)
    heads, latent = shape.num_kv_heads, shape.latent
    k = rng.standard_normal((9, heads, shape.head_dim - latent)).astype(np.float32)
    v = rng.standard_normal((9, heads, latent or shape.head_dim)).astype(np.float32)
    slots = np.array([0, 1, 2, 3, 4, 30, 31, 15, 16], np.int32)
    exported = []
    for ops in (native("float32"), NumpyOps()):
        cache = ops.allocate_kv(shape, 7)
        ops.write_kv(cache.layer(shape.num_layers - 1), *map(ops.from_host, (k, v, slots)))
        exported.append(cache.export_blocks(np.arange(7, dtype=np.int32)))
    np.testing.assert_array_equal(*exported)


def test_invalid_blocks_and_data_are_rejected(native):
    cache = native("float32").allocate_kv(SHAPE, 7)
    with pytest.raises(ValueError, match="expected blocks from 0 to 6"):
        cache.export_blocks(np.array([7], np.int32))
    with pytest.raises(ValueError, match="expected blocks of float32"):
        cache.import_blocks(np.array([1], np.int32), np.zeros((1, 2, 2, 5, 3, 10), np.uint16))
