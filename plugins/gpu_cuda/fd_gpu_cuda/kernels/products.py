"""Products with packed weights in Triton.

One program computes a tile of outputs of some tokens; the weights are the rows of its products, so that the same
instructions multiply whatever the number of tokens. It walks over the inputs span by span, in one order whatever the
batch. Weights are widened in registers to what they stand for, rounded to the type of what they are multiplied by: no
more than if they had been expanded when they were loaded. Or what they are multiplied by is rounded to 8 bits as well,
row by row, where the tensor cores multiply those.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Array

from fd_gpu_cuda.packed import PackedPart, PackedProduct

__all__ = ["Tile", "packed_product", "quantize_rows", "tile_of"]

_MOST_TOKENS = 128
_ROW_TILE = 1024


class Tile(NamedTuple):
    """How one product is cut."""

    outputs: int
    tokens: int
    num_warps: int
    num_stages: int


def tile_of(tokens: int, part: PackedPart, multiprocessors: int) -> Tile:
    """Choose a tile: narrow where wide ones would leave multiprocessors idle, with as many tokens as there are.

    What the instructions are depends on the outputs of a tile, so these do not depend on the tokens. Hopper multiplies
    8 bits in tiles of 64 only.
    """
    outputs = 64 if part.eight or triton.cdiv(part.out, 64) >= multiprocessors else 32
    columns = min(max(triton.next_power_of_2(tokens), 16), _MOST_TOKENS)
    return Tile(outputs, columns, 8 if columns == _MOST_TOKENS else 4, 4 if columns <= 32 else 3)


def packed_product(multiprocessors: int) -> PackedProduct:
    """Return the product on a device of so many multiprocessors."""

    def product(x: Array, part: PackedPart, y: Array) -> None:
        tile = tile_of(len(x), part, multiprocessors)
        if part.eight:
            x, x_scales = quantize_rows(x, torch.float8_e4m3fn if part.fp8 else torch.int8)
            values = part.values.view(x.dtype)
        else:
            x_scales, values = None, part.values.view(torch.uint8) if part.fp8 else part.values
        grid = (triton.cdiv(part.out, tile.outputs), triton.cdiv(len(x), tile.tokens))
        _multiply[grid](
            x,
            x.stride(0),
            x_scales,
            values,
            values.stride(0),
            part.scales,
            part.minima,
            part.bias,
            y,
            y.stride(0),
            len(x),
            part.out,
            part.inputs,
            part.scales.shape[1],
            part.group,
            bits=part.bits,
            fp8=part.fp8,
            eight=part.eight,
            middle=part.middle,
            grouped=part.scales.shape[1] > 1,
            has_minima=part.minima is not None,
            has_bias=part.bias is not None,
            n=tile.outputs,
            m=tile.tokens,
            k=part.span,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    return product


def quantize_rows(x: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """Round rows [T, in] to int8 or float8_e4m3fn: values, and scales float32[T], not finite where a row is not."""
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _quantize[(len(x),)](x, x.stride(0), values, scales, x.shape[1], whole=dtype == torch.int8, tile=_ROW_TILE)
    return values, scales


@triton.jit
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
def _multiply(
    x_at,
    x_stride,
    x_scales_at,
    values_at,
    values_stride,
    scales_at,
    minima_at,
    bias_at,
    y_at,
    y_stride,
    tokens,
    out,
    inputs,
    groups,
    group,
    bits: tl.constexpr,
    fp8: tl.constexpr,
    eight: tl.constexpr,
    middle: tl.constexpr,
    grouped: tl.constexpr,
    has_minima: tl.constexpr,
    has_bias: tl.constexpr,
    n: tl.constexpr,
    m: tl.constexpr,
    k: tl.constexpr,
):
    output = tl.program_id(0) * n + tl.arange(0, n)
    token = tl.program_id(1) * m + tl.arange(0, m)
    # Outputs and tokens beyond the last repeat it, and are not written.
    line = tl.minimum(output, out - 1).to(tl.int64)
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    lane = tl.arange(0, k)
    values_at += line[:, None] * values_stride + lane[None, :]
    x_at += row[None, :] * x_stride
    scales_at += line * groups
    if has_minima:
        minima_at += line * groups
    sums = tl.zeros((n, m), tl.int32 if eight and not fp8 and not grouped else tl.float32)
    values_a_step: tl.constexpr = k * 8 // bits
    for begin in range(0, inputs, values_a_step):
        values = tl.load(values_at + begin * bits // 8)
        for half in tl.static_range(8 // bits):
            first = begin + half * k
            place = first + lane
            x = tl.load(x_at + place[:, None], mask=place[:, None] < inputs, other=0.0)
            if eight:
                if grouped:
                    scale = tl.load(scales_at + first // group).to(tl.float32)
                    sums += tl.dot(values, x).to(tl.float32) * scale[:, None]
                elif fp8:
                    # Tensor cores keep few bits of long sums of these products: none is longer than a span.
                    sums = tl.dot(values, x, sums, max_num_imprecise_acc=k)
                else:
                    sums = tl.dot(values, x, sums, out_dtype=tl.int32)
            else:
                index = tl.minimum(first // group, groups - 1) if grouped else 0
                scale = tl.load(scales_at + index).to(tl.float32)
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
                    weight += tl.load(minima_at + index).to(tl.float32)[:, None]
                sums = tl.dot(weight.to(x.dtype), x, sums, input_precision="ieee")
    result = sums.to(tl.float32)
    if eight:
        if not grouped:
            result *= tl.load(scales_at).to(tl.float32)[:, None]
        result *= tl.load(x_scales_at + row)[None, :]
    if has_bias:
        result += tl.load(bias_at + line)[:, None]
    mask = (token[:, None] < tokens) & (output[None, :] < out)
    at = row[:, None] * y_stride + output[None, :]
    tl.store(y_at + at, tl.trans(result).to(y_at.dtype.element_ty), mask=mask)
