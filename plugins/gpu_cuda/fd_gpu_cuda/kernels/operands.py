"""What products of the kernels multiply: weights as they lie in memory, widened in registers span by span.

Weights are the rows of the products and tokens their columns, so that the same instructions multiply whatever the
number of tokens. Packed weights are widened to what they stand for, rounded to the type of what they are multiplied by:
no more than if they had been expanded when they were loaded. Or what they are multiplied by is rounded to 8 bits as
well, row by row, where the tensor cores multiply those. Weights that are not packed take the same walk as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Array

from fd_gpu_cuda.kernels.entry import kernel
from fd_gpu_cuda.packed import PackedPart

_ROW_TILE = 1024
_PLAIN_SPAN_BYTES = 128
"""A line of the caches."""


class Operands(NamedTuple):
    """A weight, and what it multiplies, as a kernel is given them."""

    x: Array
    """[T, in]"""
    x_scales: Array | None
    """float32[T], where x was rounded to 8 bits."""
    values: Array
    """[out, n]"""
    scales: Array | None
    minima: Array | None
    bias: Array | None
    inputs: int
    groups: int
    group: int
    span: int
    """Values of a row that are multiplied at a time."""
    bits: int
    """Of a weight."""
    eight: bool
    form: dict[str, Any]
    """Constants of `span_products`."""

    @property
    def step(self) -> int:
        """Values of a row that are read at a time."""
        return 2 * self.span if self.bits == 4 else self.span

    def stage_bytes(self, outputs: int, tokens: int) -> int:
        """Return the shared memory that one step of a tile takes while it is on its way."""
        weights = outputs * self.step * self.bits // 8
        return weights + tokens * self.step * self.x.element_size()


def operands(x: Array, weight: PackedPart | Array) -> Operands:
    """Return x [T, in] and a weight as kernels read them.

    Rounds x to 8 bits, with a launch, where the weight wants that. A weight [out, in] that is not packed has any dtype:
    x is widened to it.
    """
    if not isinstance(weight, PackedPart):
        inputs, span = weight.shape[1], _PLAIN_SPAN_BYTES // weight.element_size()
        form = _form(weight.element_size() * 8, span, inputs)
        return Operands(x, None, weight, None, None, None, inputs, 1, inputs, span, form["bits"], False, form)
    part, x_scales = weight, None
    values = part.values.view(torch.uint8) if part.fp8 and not part.eight else part.values
    if part.eight:
        x, x_scales = quantize_rows(x, torch.float8_e4m3fn if part.fp8 else torch.int8)
        values = values.view(x.dtype)
    form = _form(
        part.bits,
        part.span,
        part.inputs,
        fp8=part.fp8,
        eight=part.eight,
        middle=part.middle,
        grouped=part.scales.shape[1] > 1,
        has_minima=part.minima is not None,
    )
    groups = part.scales.shape[1]
    return Operands(
        x,
        x_scales,
        values,
        part.scales,
        part.minima,
        part.bias,
        part.inputs,
        groups,
        part.group,
        part.span,
        part.bits,
        part.eight,
        form,
    )


def _form(bits: int, span: int, inputs: int, **more: Any) -> dict[str, Any]:
    none = {"fp8": False, "eight": False, "middle": 0, "grouped": False, "has_minima": False}
    even = inputs % (2 * span if bits == 4 else span) == 0
    return {**none, **more, "bits": bits, "even": even, "k": span}


def quantize_rows(x: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """Round rows [T, in] to int8 or float8_e4m3fn: values, and scales float32[T], not finite where a row is not."""
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _quantize[(len(x),)](x, x.stride(0), values, scales, x.shape[1], whole=dtype == torch.int8, tile=_ROW_TILE)
    return values, scales


@kernel
def _quantize(x_at, x_stride, values_at, scales_at, inputs, whole: tl.constexpr, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_at += row * x_stride
    values_at += row * inputs
    largest = tl.zeros((tile,), tl.float32)
    strange = tl.zeros((tile,), tl.float32)
    for begin in range(0, inputs, tile):
        place = begin + tl.arange(0, tile)
        x = tl.load(x_at + place, mask=place < inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        strange += x * 0.0  # NaN for what is not finite
    most = tl.max(largest, 0)
    limit = 127.0 if whole else 448.0
    # What is smaller becomes 0: its inverse would be infinite.
    inverse = tl.where(most > 1e-30, limit / most, 0.0)
    tl.store(scales_at + row, most / limit + tl.sum(strange, 0))
    # To the nearest, to the even one if it is halfway: adding 1.5 * 2^23 leaves no bits of a fraction, 2^-9 times that
    # leaves 9. What is stored needs no further rounding, which devices and the interpreter do differently.
    for begin in range(0, inputs, tile):
        place = begin + tl.arange(0, tile)
        x = tl.load(x_at + place, mask=place < inputs, other=0.0).to(tl.float32) * inverse
        if whole:
            x = (x + 12582912.0) - 12582912.0
        else:
            # Three bits of mantissa are left of 23; below 2^-6, the smallest exponent, multiples of 2^-9.
            code = x.to(tl.int32, bitcast=True)
            rounded = ((code + 0x7FFFF + ((code >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
            x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, rounded)
        tl.store(values_at + place, x.to(values_at.dtype.element_ty), mask=place < inputs)


@triton.jit
def span_products(
    sums,
    x_rows,
    values_rows,
    scales_rows,
    minima_rows,
    begin,
    end,
    inputs,
    groups,
    group,
    bits: tl.constexpr,
    fp8: tl.constexpr,
    eight: tl.constexpr,
    middle: tl.constexpr,
    grouped: tl.constexpr,
    has_minima: tl.constexpr,
    even: tl.constexpr,
    k: tl.constexpr,
):
    """Add the products of inputs `begin` to `end` to sums [n, m], span by span and in one order.

    `x_rows` [m], `values_rows` [n], `scales_rows` [n] and `minima_rows` [n] point to where rows begin; `begin` is a
    multiple of a step. Scales of rows, and those of x, are left to the caller where `eight` is set.
    """
    lane = tl.arange(0, k)
    x_at = x_rows[None, :] + lane[:, None]
    values_at = values_rows[:, None] + lane[None, :]
    values_a_step: tl.constexpr = 2 * k if bits == 4 else k
    for at in range(begin, end, values_a_step):
        if bits == 4:
            values = tl.load(values_at + at // 2)
        elif bits == 8 or even:
            values = tl.load(values_at + at)
        else:
            # Packed rows end with zeros; these do not.
            values = tl.load(values_at + at, mask=at + lane[None, :] < inputs, other=0.0)
        for half in tl.static_range(values_a_step // k):
            first = at + half * k
            if even:
                x = tl.load(x_at + first)
            else:
                x = tl.load(x_at + first, mask=first + lane[:, None] < inputs, other=0.0)
            if eight:
                if grouped:
                    scale = tl.load(scales_rows + first // group).to(tl.float32)
                    sums += tl.dot(values, x).to(tl.float32) * scale[:, None]
                elif fp8:
                    # Tensor cores keep few bits of long sums of these products: none is longer than a span.
                    sums = tl.dot(values, x, sums, max_num_imprecise_acc=k)
                else:
                    sums = tl.dot(values, x, sums, out_dtype=tl.int32)
            elif bits > 8:
                sums = tl.dot(values, x.to(values.dtype), sums, input_precision="ieee")
            else:
                index = tl.minimum(first // group, groups - 1) if grouped else 0
                scale = tl.load(scales_rows + index).to(tl.float32)
                if fp8:
                    # float16 with the same bits is 2^8 times smaller: its exponents begin at -14, not at -6.
                    code = values.to(tl.uint16)
                    number = (((code & 128) << 8) | ((code & 127) << 7)).to(tl.float16, bitcast=True)
                    number = number.to(tl.float32) * 256.0
                elif bits == 4:
                    number = ((values >> 4) if half else (values & 15)).to(tl.float32) - middle
                else:
                    number = values.to(tl.float32)
                weight = number * scale[:, None]
                if has_minima:
                    weight += tl.load(minima_rows + index).to(tl.float32)[:, None]
                sums = tl.dot(weight.to(x.dtype), x, sums, input_precision="ieee")
    return sums
