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

LINE_BYTES = 128
"""Bytes of a cache line; rows of packed weights are padded to a multiple."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows of a packed linear with the same format: (value - middle) * scale + minimum."""

    values: Array
    """int8[out, n], with the bits of FP8 values, if activations are quantized; else `interleaved` uint8[out, n].

    For 4 bits uint8[out, n / 2]. Rows are zero-padded to a multiple of `LINE_BYTES`.
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
    """The stored value of 0: half of the range if values are interleaved and signed, else 0."""
    group: int
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
    bias: Array | None = None
    """[experts * out] in the pack's dtype."""

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
        bias = None if self.bias is None else self.bias[rows]
        if not isinstance(weight, PackedPart):
            return TorchLinear(weight[rows], bias)
        minima = None if weight.minima is None else weight.minima[rows]
        own = replace(weight, values=weight.values[rows], scales=weight.scales[rows], minima=minima)
        return PackedLinear((replace(own, bias=None if bias is None else bias.float()),))


def pack_linear(
    parts: Sequence[Weight], biases: Sequence[RawTensor] | None, device: Any, eight: Callable[[bool], bool]
) -> PackedLinear | None:
    """Upload packed weights; None if one is not packed, or has unsupported groups.

    `eight` has the 8-bit types that the device multiplies: integers (False) or floating-point numbers (True).
    """
    packed = [part for part in parts if isinstance(part, PackedTensor) and _has_words(part)]
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
    packed = [weight for weight in weights if isinstance(weight, PackedTensor) and _has_words(weight)]
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


def _has_words(part: PackedTensor) -> bool:
    """Return True if a group is a multiple of four words, see `interleaved`, or a row has one."""
    return part.scales.shape[1] == 1 or part.group % (32 if part.bits == 4 else 16) == 0


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
    exact = bits == 8 and first.minima is None and (rows or group % LINE_BYTES == 0) and eight(fp8)
    signed = not (fp8 or exact or (bits == 4 and first.minima is not None))
    middle = 2 ** (bits - 1) if signed else 0
    inputs = first.shape[1]
    values = np.concatenate([part.values for part in parts])
    values = np.pad(values, ((0, 0), (0, -inputs % (LINE_BYTES * 8 // bits))))
    if not exact:
        values = interleaved(values.view(np.uint8) + np.uint8(middle), bits)
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
        inputs,
        exact,
    )


def interleaved(values: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return rows [out, n] in the order of words of 32 bits, [out, n * bits / 8]; n is a multiple of 32.

    A thread's operand of tensor cores has inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16 in a row of 4 threads t. They
    are adjacent in a word, for 4 bits with those of the next 16.
    """
    found = values.reshape(len(values), -1, 8 // bits, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5)
    if bits == 4:
        found = found[..., 0] | (found[..., 1] << np.uint8(4))
    return np.ascontiguousarray(found.reshape(len(values), -1))


def in_order(values: Array, bits: int) -> Array:
    """Return the rows [out, n] of `interleaved` values."""
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), 2).flatten(1)
    return values.unflatten(1, (-1, 4, 8 // bits, 2, 2)).permute(0, 1, 3, 4, 2, 5).flatten(1)


def _factors(parts: Sequence[npt.NDArray[np.float32]], device: Any) -> Array:
    whole = np.concatenate(parts)
    with np.errstate(over="ignore"):
        half = whole.astype(np.float16)
    return torch.from_numpy(half if (half == whole).all() else whole).to(device)
