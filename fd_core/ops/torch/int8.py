"""The torch pack on a processor that multiplies bytes: `int8` weights stay as they are stored.

oneDNN's product of bytes, which torch carries for its own quantized models, adds whole numbers exactly, so a row has
the same bits alone and in every batch. torch's other operations for packed weights are not used: those of 4 bits and
the one that multiplies int8 by bfloat16 lose to expanded weights from some ten rows on (benchmarks/NOTES.md), and
dynamic quantization of a whole batch would let one row change another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fd_core.ops.contract import Array
from fd_core.ops.torch.ops import TorchOps
from fd_core.ops.weights import PackedTensor, RawTensor, Weight


@dataclass(frozen=True, slots=True)
class TorchInt8Linear:
    """A prepared linear with a scale for each of its rows."""

    weight: Array
    """int8[out, in] in the order that oneDNN chose."""
    scales: Array
    """float32[out]"""
    bias: Array | None
    """float32[out]"""

    def __call__(self, x: Array) -> Array:
        """Multiply x [T, in], rounded to 8 bits row by row; rows that are not finite stay so."""
        wide = x.float()
        scale = wide.abs().amax(dim=1, keepdim=True) / 127
        values = wide.div_(scale.clamp_min(1e-30)) if wide is not x else wide / scale.clamp_min(1e-30)
        y = _product(values.round_().add_(128).to(torch.uint8), self.weight, self.scales).mul_(scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)


class TorchInt8Ops(TorchOps):
    """Operations on torch tensors of the processor, where `multiplies_bytes_exactly`."""

    weight_formats = frozenset({"int8"})

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Any:
        """Keep packed parts packed, but where a row has several scales or minima, or a part is not packed."""
        packed = [part for part in parts if isinstance(part, PackedTensor) and _fits(part)]
        if len(packed) < len(parts):
            return super().prepare_linear(parts, biases, gated=gated)
        values = torch.from_numpy(np.concatenate([part.values for part in packed]))
        scales = torch.from_numpy(np.concatenate([part.scales[:, 0] for part in packed]))
        bias = None if biases is None else torch.from_numpy(np.concatenate([each.to_float32() for each in biases]))
        return TorchInt8Linear(torch.ops.onednn.qlinear_prepack(values, None), scales, bias)

    def linear(self, x: Array, weight: Any) -> Array:
        """Multiply by the transposed weight and add the bias."""
        return weight(x) if isinstance(weight, TorchInt8Linear) else super().linear(x, weight)


def multiplies_bytes_exactly() -> bool:
    """Try the product: it saturates on processors without VNNI, and is missing from some builds of torch."""
    weight = torch.full((32, 256), 127, dtype=torch.int8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        found = [_product(torch.full((rows, 256), 255, dtype=torch.uint8), packed, torch.ones(32)) for rows in (1, 64)]
    except (AttributeError, RuntimeError):
        return False
    return all(bool((each == 127 * 127 * 256).all()) for each in found)


def _fits(part: PackedTensor) -> bool:
    return part.format == "int8" and part.minima is None and part.scales.shape[1] == 1


def _product(x: Array, weight: Array, scales: Array) -> Array:
    """Return float32 (x - 128) @ weight * scales, of uint8 x."""
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 128, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
