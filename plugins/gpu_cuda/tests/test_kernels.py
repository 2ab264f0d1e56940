"""The Triton kernels, in Triton's interpreter, against the numpy oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_core.ops.contract import Heads, KVShape, Rope  # noqa: E402 - only where both are installed
from fd_core.ops.numpy_ops import NumpyOps  # noqa: E402
from fd_core.ops.torch_ops import TorchOps  # noqa: E402
from fd_core.testing.arrays import Values, assert_near, on_device, step_input  # noqa: E402
from processor import plain_attention  # noqa: E402

from fd_gpu_cuda.kernels.attention import paged_attention  # noqa: E402
from fd_gpu_cuda.kv_cache import CudaLayer  # noqa: E402

F32 = torch.float32
BLOCKS = 40
BATCHES = {
    "decode": [(1, 5), (1, 20), (1, 1)],
    "prefill": [(7, 7), (20, 20)],
    "chunks behind a context": [(20, 30), (3, 31)],
    "decodes between chunks": [(1, 9), (17, 20), (1, 1), (1, 30), (2, 8)],
    "longer than a tile of keys": [(5, 150), (1, 149), (1, 65)],
}
GEOMETRIES = {
    "shared heads": {"nh": 6, "nkv": 2, "d": 16},
    "a head each": {"nh": 3, "nkv": 3, "d": 8},
    "one for all": {"nh": 4, "nkv": 1, "d": 24},
}


def compare(
    attend: Any, batch: str, geometry: str = "shared heads", dtype: Any = torch.float32, **options: Any
) -> None:
    values, rng = Values(7), np.random.default_rng(3)
    sizes = GEOMETRIES[geometry]
    nh, nkv, d, block_size = sizes["nh"], sizes["nkv"], sizes["d"], options.pop("block_size", 4)
    rows = BATCHES[batch]
    width = max(context for _, context in rows) // block_size + 2
    blocks = max(BLOCKS, width * len(rows))
    tables = rng.permutation(blocks)[: len(rows) * width].reshape(len(rows), width).astype(np.int32)
    used = np.array([-(-context // block_size) for _, context in rows])
    seen = np.where(np.arange(width) < used[:, None], tables, 2**20).astype(np.int32)
    step = step_input(rows, block_size, tables)
    heads = Heads(nh, nkv, d, 0.3, Rope(None, None), **options)
    q, k, v = (
        values(len(step.positions), nh, d),
        values(blocks * block_size, nkv, d),
        values(blocks * block_size, nkv, d),
    )
    everywhere = np.arange(blocks * block_size, dtype=np.int32)

    oracle, ops = NumpyOps(), TorchOps()
    layer = oracle.allocate_kv(KVShape(1, nkv, d, block_size), blocks).layer(0)
    oracle.write_kv(layer, k, v, everywhere)
    expected = oracle.paged_attention(q, layer, heads, step)

    q, k, v = (torch.from_numpy(array).to(dtype) for array in (q, k, v))
    # What lies beyond a context has no meaning: here it points nowhere.
    given = on_device(ops, replace(step, block_tables=seen))
    found = attend(q, CudaLayer(k, v, block_size), heads, given)
    assert found.dtype == dtype
    if dtype == torch.float32:
        assert_near(ops, found, expected)
    else:
        np.testing.assert_allclose(found.float().numpy(), expected, atol=2e-3)


@pytest.mark.parametrize("attend", [paged_attention, plain_attention])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_over_scattered_blocks(attend: Any, batch: str) -> None:
    compare(attend, batch)


@pytest.mark.parametrize("attend", [paged_attention, plain_attention])
@pytest.mark.parametrize("options", [{"window": 4}, {"softcap": 2.0}, {"window": 70, "softcap": 5.0}])
@pytest.mark.parametrize("batch", ["decodes between chunks", "longer than a tile of keys"])
def test_attention_with_window_and_softcap(attend: Any, batch: str, options: dict[str, Any]) -> None:
    compare(attend, batch, **options)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_of_every_geometry(geometry: str) -> None:
    compare(paged_attention, "decode", geometry)
    compare(paged_attention, "decodes between chunks", geometry, block_size=16)


def test_attention_in_16_bits_sums_in_float32() -> None:
    # float16, because the interpreter cannot multiply matrices of bfloat16.
    compare(paged_attention, "longer than a tile of keys", dtype=torch.float16)


def test_a_row_alone_gives_the_same_bits() -> None:
    values, ops = Values(1), TorchOps()
    rows = [(1, 90), (9, 40), (1, 3)]
    tables = np.random.default_rng(0).permutation(3 * 24).reshape(3, 24).astype(np.int32)
    layer = ops.allocate_kv(KVShape(1, 2, 8, 4), 72).layer(0)
    slots = ops.from_host(np.arange(288, dtype=np.int32))
    ops.write_kv(layer, ops.from_host(values(288, 2, 8)), ops.from_host(values(288, 2, 8)), slots)
    heads, q = Heads(4, 2, 8, 0.3, Rope(None, None)), ops.from_host(values(11, 4, 8))
    together = paged_attention(q, layer, heads, on_device(ops, step_input(rows, 4, tables)))
    begin = 0
    for row, (count, _) in enumerate(rows):
        alone = on_device(ops, step_input(rows[row : row + 1], 4, tables[row : row + 1]))
        assert torch.equal(
            paged_attention(q[begin : begin + count], layer, heads, alone), together[begin : begin + count]
        )
        begin += count
