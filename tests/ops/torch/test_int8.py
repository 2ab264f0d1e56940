"""int8 weights with torch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fd_core.backends.cpu import CpuBackend
from fd_core.config import EngineConfig
from fd_core.ops.torch import ops as torch_pack
from fd_core.ops.torch.ops import TorchInt8Linear, TorchInt8Ops, TorchLinear, TorchOps, multiplies_bytes_exactly
from fd_core.ops.weights import PackedTensor
from fd_core.testing.models.arrays import packed_weight, raw

pytestmark = pytest.mark.skipif(not multiplies_bytes_exactly(), reason="this processor has no VNNI")


def rows_of(count: int, inputs: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).standard_normal((count, inputs), np.float32))


@pytest.mark.parametrize(("out", "inputs"), [(1, 7), (75, 768), (33, 2048)])
def test_products_are_exact_except_for_input_rounding(out: int, inputs: int) -> None:
    ops, x, weight = TorchInt8Ops(), rows_of(70, inputs), packed_weight("int8", out, inputs)
    scale = x.abs().amax(1, keepdim=True) / 127
    whole = (x / scale).round().double() @ torch.from_numpy(weight.values).double().T
    expected = whole * scale * torch.from_numpy(weight.scales[:, 0])
    prepared = ops.prepare_linear([weight], [raw(np.arange(out))])
    assert isinstance(prepared, TorchInt8Linear)
    found = ops.linear(x, prepared) - torch.arange(out)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_is_bitwise_equal_in_any_batch(dtype: str) -> None:
    ops = TorchInt8Ops(dtype)
    x, weight = rows_of(130, 576).to(ops.torch_dtype), ops.prepare_linear([packed_weight("int8", 300, 576)])
    together = ops.linear(x, weight)
    assert together.dtype == ops.torch_dtype
    for rows in (slice(0, 1), slice(3, 5), slice(9, 26), slice(64, 128), slice(129, 130)):
        assert torch.equal(ops.linear(x[rows], weight), together[rows])


def test_non_finite_values_stay_in_their_row_and_zeros_stay() -> None:
    ops, x = TorchInt8Ops(), rows_of(4, 64)
    weight = ops.prepare_linear([packed_weight("int8", 40, 64)])
    x[2] = 0
    right = ops.linear(x, weight)
    given = x.clone()
    given[1, 7], given[3, 5] = np.nan, np.inf
    found = ops.linear(given, weight)
    assert not torch.isfinite(found[[1, 3]]).any()
    assert torch.equal(found[[0, 2]], right[[0, 2]]) and not found[2].any()
    assert torch.isfinite(given[0]).all()  # the input is unchanged


def test_other_int8_formats_are_dequantized() -> None:
    whole = packed_weight("int8", 8, 64)
    minima = PackedTensor("int8", 8, whole.values, whole.scales, np.ones((8, 1), np.float32))
    for parts in ([packed_weight("int8", 8, 64, group=32)], [minima], [whole, raw(np.ones((2, 64)))]):
        prepared = TorchInt8Ops().prepare_linear(parts)
        assert isinstance(prepared, TorchLinear)
        assert np.array_equal(prepared.weight.numpy(), np.concatenate([part.to_float32() for part in parts]))


def test_backend_supports_int8_where_products_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend(EngineConfig(model="x", native_kernels=False))
    assert isinstance(backend.make_ops(), TorchInt8Ops)
    assert "int8 weights by oneDNN" in backend.describe()
    product = torch_pack._product
    monkeypatch.setattr(torch_pack, "_product", lambda *given: product(*given) - 1)
    assert type(backend.make_ops()) is TorchOps
