"""float16 in the torch pack: precision, range, and KV that is not confused with bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fd_core.engine.building.kv_offload import kv_identity  # noqa: E402 - only where torch is installed
from fd_core.kv.block_format import BlockFormat  # noqa: E402
from fd_core.ops.contract import KVShape  # noqa: E402
from fd_core.ops.numpy.ops import NumpyOps  # noqa: E402
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.ops.weights import RawTensor  # noqa: E402
from fd_core.testing.models.arrays import Values, sample_input  # noqa: E402
from fd_core.testing.models.checkpoints import write_checkpoint  # noqa: E402
from tests.ops.packs import on_device  # noqa: E402

SHAPE = KVShape(2, 3, 10, 5)


def test_float16_weights_stay_exact() -> None:
    """GPTQ and AWQ store their unpacked tensors in float16; bfloat16 would round them."""
    values = np.random.default_rng(0).standard_normal((7, 12)).astype(np.float16)
    kept = {
        dtype: TorchOps(dtype).prepare_linear([RawTensor("F16", values)]).weight for dtype in ("float16", "bfloat16")
    }
    assert kept["float16"].numpy().tobytes() == values.tobytes()
    assert not np.array_equal(kept["bfloat16"].float().numpy(), values)


def test_exported_blocks_are_bitwise_float16() -> None:
    cache = TorchOps("float16").allocate_kv(SHAPE, 4)
    data = np.random.default_rng(0).integers(0, 2**16, (2, 2, 2, 5, 3, 10)).astype(np.uint16).view(np.float16)
    cache.import_blocks(np.array([3, 1]), data)
    exported = cache.export_blocks(np.array([3, 1]))
    assert exported.dtype == np.float16
    assert exported.tobytes() == data.tobytes()
    with pytest.raises(ValueError, match="expected float16"):
        cache.import_blocks(np.array([3, 1]), data.view(np.uint16))


def test_float16_kv_differs_from_bfloat16_in_name_and_type(tmp_path: Path) -> None:
    """Both take two bytes: one must never be read as the other."""
    formats = {dtype: BlockFormat.of(SHAPE, dtype) for dtype in ("float16", "bfloat16")}
    assert formats["float16"].bytes == formats["bfloat16"].bytes
    assert formats["float16"].dtype != formats["bfloat16"].dtype
    write_checkpoint("llama", tmp_path)
    names = {dtype: kv_identity(tmp_path, f"torch/{dtype}/plain/{SHAPE}") for dtype in formats}
    assert names["float16"] != names["bfloat16"]


def test_logits_and_host_arrays_are_float32() -> None:
    ops, oracle = TorchOps("float16"), NumpyOps()
    values = Values(1)
    weight, x = RawTensor("F32", values(50, 16)), values(3, 16)
    found = ops.to_host(ops.linear(ops.from_host(x).half(), ops.prepare_linear([weight])))
    assert found.dtype == np.float32
    expected = oracle.linear(x, oracle.prepare_linear([weight]))
    np.testing.assert_allclose(found, expected, atol=5e-3 * np.abs(expected).max())


def test_overflow_shows_in_the_peak_of_its_row_only() -> None:
    ops = TorchOps("float16")
    weight = ops.prepare_linear([RawTensor("F32", np.full((8, 16), 100.0, np.float32))])
    x = torch.ones(2, 16, dtype=torch.float16)
    x[1] = 60.0  # 16 x 60 x 100 is above 65,504
    logits = ops.linear(x, weight).float()
    _, peaks = ops.sample(logits, on_device(ops, sample_input(2)))
    assert np.isfinite(ops.to_host(peaks)).tolist() == [True, False]
