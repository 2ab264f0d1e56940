"""Packed weights of linear layers in the layout of `kernels.products`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fd_core.ops.contract import Array
from fd_core.ops.torch.ops import TorchLinear
from fd_core.ops.weights import FP8, PackedTensor, RawTensor, Weight

_LONGEST_SPAN = 64
_LONGEST_SPAN_OF_8_BITS = 128


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows of a packed linear with the same format: (value - middle) * scale + minimum."""

    values: Array
    """int8[out, n], with the bits of FP8 values; for 4 bits uint8[out, n / 2].

    Rows are zero-padded to a multiple of spans, or of pairs of spans. A byte of 4-bit values holds one of a span in its
    low half, and one of the next span in its high half.
    """
    scales: Array
    """[out, groups]: float16 if exact, else float32."""
    minima: Array | None
    bias: Array | None
    """float32[out]"""
    bits: int
    """4 or 8."""
    fp8: bool
    middle: int
    """8 if 4-bit values are signed, else 0."""
    group: int
    span: int
    """Values of a row that are multiplied at a time: a power of two that divides the group, or a row has one group."""
    inputs: int
    eight: bool
    """True if activations are quantized to the same 8-bit type, with one scale per row."""

    @property
    def out(self) -> int:
        """Number of rows."""
        return int(self.values.shape[0])


PackedProduct = Callable[[Array, PackedPart, Array], None]
"""Multiplies x [T, in] into y [T, out], with any row strides; does not synchronize."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A prepared linear whose weights stay packed; the results of its parts are concatenated."""

    parts: tuple[PackedPart, ...]

    def __call__(self, x: Array, product: PackedProduct) -> Array:
        """[T, in] -> [T, out]"""
        y = x.new_empty(len(x), sum(part.out for part in self.parts))
        if len(x):
            x = x if x.stride(1) == 1 else x.contiguous()
            for part, mine in zip(self.parts, y.split([part.out for part in self.parts], dim=1), strict=True):
                product(x, part, mine)
        return y


@dataclass(frozen=True, slots=True)
class StackedExperts(Sequence[Any]):
    """One linear of all experts of a block, each also a prepared linear; gate precedes up."""

    weight: PackedPart | Array
    """[experts * out, in]"""
    experts: int

    @property
    def out(self) -> int:
        """Rows of one expert."""
        weight = self.weight.values if isinstance(self.weight, PackedPart) else self.weight
        return int(weight.shape[0]) // self.experts

    def __len__(self) -> int:
        return self.experts

    def __getitem__(self, expert: Any) -> Any:
        if not 0 <= expert < self.experts:
            raise IndexError(expert)
        rows, weight = slice(expert * self.out, (expert + 1) * self.out), self.weight
        if not isinstance(weight, PackedPart):
            return TorchLinear(weight[rows], None)
        minima = None if weight.minima is None else weight.minima[rows]
        return PackedLinear((replace(weight, values=weight.values[rows], scales=weight.scales[rows], minima=minima),))


def pack_linear(
    parts: Sequence[Weight], biases: Sequence[RawTensor] | None, device: Any, eight: Callable[[bool], bool]
) -> PackedLinear | None:
    """Upload packed weights; None if one is not packed, or has unsupported groups.

    `eight` has the 8-bit types that the device multiplies: integers (False) or floating-point numbers (True).
    """
    packed = [part for part in parts if isinstance(part, PackedTensor) and _span(part, _LONGEST_SPAN)]
    if len(packed) < len(parts):
        return None
    found = [None] * len(packed) if biases is None else [bias.to_float32() for bias in biases]
    runs: list[tuple[list[PackedTensor], list[npt.NDArray[np.float32] | None]]] = []
    for part, bias in zip(packed, found, strict=True):
        if not runs or _form(runs[-1][0][0]) != _form(part):
            runs.append(([], []))
        runs[-1][0].append(part)
        runs[-1][1].append(bias)
    return PackedLinear(tuple(_packed(run, biases, device, eight) for run, biases in runs))


def pack_stack(weights: Sequence[Weight], device: Any, eight: Callable[[bool], bool]) -> PackedPart | None:
    """Upload many weights into one tensor; None if their formats differ.

    They are uploaded one by one, to avoid a second copy of all of them on host or device.
    """
    packed = [weight for weight in weights if isinstance(weight, PackedTensor) and _span(weight, _LONGEST_SPAN)]
    if len(packed) < len(weights) or len({_form(weight) for weight in packed}) > 1:
        return None
    rows, row = sum(weight.shape[0] for weight in packed), 0
    values, factors = None, []
    for weight in packed:
        part = _packed([weight], [None], device, eight)
        if values is None:
            values = part.values.new_empty(rows, part.values.shape[1])
        values[row : row + part.out].copy_(part.values)
        row += part.out
        factors.append((part.scales, part.minima))
    scales, minima = zip(*factors, strict=True)
    return replace(
        part, values=values, scales=torch.cat(scales), minima=None if part.minima is None else torch.cat(minima)
    )


def _span(part: PackedTensor, longest: int) -> int:
    """Return the longest span that divides a group, 0 if that is below 16."""
    if part.scales.shape[1] == 1:
        return longest
    span = min(part.group & -part.group, longest)
    return span if span >= 16 else 0


def _form(part: PackedTensor) -> tuple[Any, ...]:
    return part.format == FP8, 4 if part.bits == 4 else 8, part.minima is None, part.group


def _packed(
    parts: Sequence[PackedTensor],
    biases: Sequence[npt.NDArray[np.float32] | None],
    device: Any,
    eight: Callable[[bool], bool],
) -> PackedPart:
    first = parts[0]
    fp8, bits, _, group = _form(first)
    rows = first.scales.shape[1] == 1
    # 8-bit products are scaled once per group, which does not pay off for short groups.
    exact = bits == 8 and first.minima is None and (rows or group % _LONGEST_SPAN_OF_8_BITS == 0) and eight(fp8)
    span = _span(first, _LONGEST_SPAN_OF_8_BITS if exact else _LONGEST_SPAN)
    middle = 8 if bits == 4 and first.minima is None else 0
    inputs = first.shape[1]
    values = np.concatenate([part.values for part in parts])
    values = np.pad(values, ((0, 0), (0, -inputs % (2 * span if bits == 4 else span))))
    if bits == 4:
        pairs = (values + np.int8(middle)).view(np.uint8).reshape(len(values), -1, 2, span)
        values = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(len(values), -1)
    minima = [part.minima for part in parts if part.minima is not None]
    bias = [each for each in biases if each is not None]
    return PackedPart(
        torch.from_numpy(values).to(device),
        _factors([part.scales for part in parts], device),
        _factors(minima, device) if minima else None,
        torch.from_numpy(np.concatenate(bias)).to(device) if bias else None,
        bits,
        fp8,
        middle,
        group,
        span,
        inputs,
        exact,
    )


def _factors(parts: Sequence[npt.NDArray[np.float32]], device: Any) -> Array:
    whole = np.concatenate(parts)
    with np.errstate(over="ignore"):
        half = whole.astype(np.float16)
    return torch.from_numpy(half if (half == whole).all() else whole).to(device)
