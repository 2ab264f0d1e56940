"""Products with weights in Triton: stored weights are widened in registers span by span.

Weights are the rows of the products and tokens their columns, so that the instructions do not depend on the number of
tokens. Packed weights are dequantized and rounded to the type of the activations, as precise as dequantizing at load.
Or activations are quantized to 8 bits row by row, if the tensor cores support it. Unpacked weights use the same loop
without widening.

One program computes a tile of outputs of some tokens. Inputs are cut at fixed positions; each cut is summed from zero,
and the sums of cuts are added in order, by one program or, if few tokens would leave the device idle, by the last of
several with a cut each. So a row has the same bits alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Array

from fd_gpu_cuda.kernels.entry import kernel
from fd_gpu_cuda.packed import PackedPart

_ROW_TILE = 1024
_PLAIN_SPAN_BYTES = 128
"""Bytes of a cache line."""


class Operands(NamedTuple):
    """Kernel arguments of a weight and its activations."""

    x: Array
    """[T, in]"""
    x_scales: Array | None
    """float32[T], if x was quantized to 8 bits."""
    values: Array
    """[out, n]"""
    scales: Array | None
    minima: Array | None
    bias: Array | None
    inputs: int
    groups: int
    group: int
    form: dict[str, Any]
    """Constants of `span_products`."""

    @property
    def bits(self) -> int:
        """Of a weight."""
        return int(self.form["bits"])

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Operands, except the bias, with row strides."""
        return self.x, self.x.stride(0), self.x_scales, self.values, self.values.stride(0), self.scales, self.minima

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Scalar arguments of `span_products`."""
        return self.inputs, self.groups, self.group


def operands(x: Array, weight: PackedPart | Array) -> Operands:
    """Return the kernel arguments for x [T, in] and a weight.

    Quantizes x to 8 bits, with a launch, if the weight requires it. An unpacked weight [out, in] may have any dtype: x
    is widened to it.
    """
    if not isinstance(weight, PackedPart):
        inputs, span = weight.shape[1], _PLAIN_SPAN_BYTES // weight.element_size()
        return Operands(x, None, weight, None, None, None, inputs, 1, inputs, _form(weight.itemsize * 8, span, inputs))
    part, x_scales, groups = weight, None, weight.scales.shape[1]
    values = part.values.view(torch.uint8) if part.fp8 and not part.eight else part.values
    if part.eight:
        x, x_scales = quantize_rows(x, torch.float8_e4m3fn if part.fp8 else torch.int8)
        values = values.view(x.dtype)
    form = _form(part.bits, part.span, part.inputs)
    form |= {"fp8": part.fp8, "eight": part.eight, "middle": part.middle}
    form |= {"grouped": groups > 1, "has_minima": part.minima is not None}
    return Operands(x, x_scales, values, part.scales, part.minima, part.bias, part.inputs, groups, part.group, form)


def _form(bits: int, span: int, inputs: int) -> dict[str, Any]:
    """Return the constants for unpacked weights; `span` values of a row are multiplied at a time."""
    even = inputs % (2 * span if bits == 4 else span) == 0
    none = {"fp8": False, "eight": False, "middle": 0, "grouped": False, "has_minima": False}
    return {**none, "bits": bits, "even": even, "k": span}


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
        strange += x * 0.0  # NaN for values that are not finite
    most = tl.max(largest, 0)
    limit = 127.0 if whole else 448.0
    # Smaller values become 0: their inverse would be infinite.
    inverse = tl.where(most > 1e-30, limit / most, 0.0)
    tl.store(scales_at + row, most / limit + tl.sum(strange, 0))
    # Round to nearest even: adding 1.5 * 2^23 leaves no fraction bits, 2^-9 times that leaves 9. Stores need no further
    # rounding, which differs between devices and the interpreter.
    for begin in range(0, inputs, tile):
        place = begin + tl.arange(0, tile)
        x = tl.load(x_at + place, mask=place < inputs, other=0.0).to(tl.float32) * inverse
        if whole:
            x = (x + 12582912.0) - 12582912.0
        else:
            # Three bits of mantissa of 23 remain; below 2^-6, the smallest exponent, multiples of 2^-9.
            code = x.to(tl.int32, bitcast=True)
            rounded = ((code + 0x7FFFF + ((code >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
            x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, rounded)
        tl.store(values_at + place, x.to(values_at.dtype.element_ty), mask=place < inputs)


@triton.jit
def span_products(
    sums, x_rows, values_rows, scales_rows, minima_rows, begin, end, inputs, groups, group,
    bits: tl.constexpr, fp8: tl.constexpr, eight: tl.constexpr, middle: tl.constexpr, grouped: tl.constexpr,
    has_minima: tl.constexpr, even: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    """Add the products of inputs `begin` to `end` to sums [n, m], span by span and in one order.

    `x_rows` [m], `values_rows` [n], `scales_rows` [n] and `minima_rows` [n] point to where rows begin; `begin` is a
    multiple of a step. With `eight`, the caller applies scales of rows and of x.
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
                    # Tensor cores accumulate these products with few bits, so no sum is longer than a span.
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


WeightProduct = Callable[[Array, PackedPart | Array, Array], None]
"""Multiplies x [T, in] by a weight [out, in] into y [T, out], with any row strides; does not synchronize."""

MOST_TOKENS = 128
_FEW_TOKENS = 32
EVERY_TILE = (1, 32, 64, MOST_TOKENS)
"""Numbers of tokens with different tiles."""
_SHORTEST_CUT = 512
"""Inputs per cut; a multiple of every step."""
_PROGRAMS_A_MULTIPROCESSOR = 2
_LEFT = 2048
"""Bytes of shared memory that the stages leave to the rest of a program."""


class ProductDevice(NamedTuple):
    """Properties of a device that determine tiles."""

    multiprocessors: int
    shared_memory: int
    """Shared memory of a block in bytes."""


class Tile(NamedTuple):
    """Tiling of one product."""

    outputs: int
    tokens: int
    cut: int
    """Inputs per cut, which is summed from zero."""
    splits: int
    """Programs that share the cuts of a tile of outputs; 1 computes all of them."""
    num_warps: int
    num_stages: int


def stages(operand: Operands, outputs: int, tokens: int, device: ProductDevice, most: int) -> int:
    """Return the number of pipeline stages of a tile, limited by the device's shared memory."""
    step = operand.form["k"] * (2 if operand.bits == 4 else 1)  # values of a row per read
    step_bytes = outputs * step * operand.bits // 8 + tokens * step * operand.x.element_size()
    return max(1, min(most, (device.shared_memory - _LEFT) // step_bytes))


def tile_of(tokens: int, out: int, operand: Operands, device: ProductDevice) -> Tile:
    """Choose a tile for the number of tokens, with enough programs to saturate memory for few tokens.

    The order of sums depends only on the weight and the device, never on the tokens. Tensor cores multiply 16 outputs
    at a time, Hopper's 64, so that no tile has fewer.
    """
    exact = operand.bits == 32 or operand.x.dtype == torch.float32  # multiplied without tensor cores
    outputs = 16 if operand.bits == 32 else 32 if exact else 64
    columns = min(max(triton.next_power_of_2(tokens), 16), 64 if exact else MOST_TOKENS)
    blocks = triton.cdiv(out, outputs)
    cuts = min(_PROGRAMS_A_MULTIPROCESSOR * device.multiprocessors // blocks, operand.inputs // _SHORTEST_CUT)
    cut, splits = operand.inputs, 1
    if cuts > 1:
        cut = triton.cdiv(triton.cdiv(operand.inputs, cuts), _SHORTEST_CUT) * _SHORTEST_CUT
        splits = triton.cdiv(operand.inputs, cut) if tokens <= _FEW_TOKENS else 1
    few = columns <= _FEW_TOKENS
    # 16-bit weights need no widening, so a thread has registers for twice the sums.
    many = columns == MOST_TOKENS and operand.bits != 16
    return Tile(
        outputs, columns, cut, splits, 8 if many else 4, stages(operand, outputs, columns, device, 5 if few else 3)
    )


def weight_product(device: ProductDevice) -> WeightProduct:
    """Return the product on a device.

    It has a counter per tile of outputs, which is 0 between launches, so launches must be sequential on one
    stream.
    """
    kept: dict[torch.device, Array] = {}
    compiled: set[Any] = set()

    def counters(count: int, place: torch.device) -> Array:
        # Allocated at the first product, before any capture; no split product has more tiles than this.
        if place not in kept:
            kept[place] = torch.zeros(_PROGRAMS_A_MULTIPROCESSOR * device.multiprocessors, dtype=torch.int32).to(place)
        return kept[place][:count]

    def product(x: Array, weight: PackedPart | Array, y: Array) -> None:
        operand = operands(x, weight)
        key = x.dtype, y.dtype, y.shape[1], operand.values.dtype, operand.inputs, tuple(operand.form.items())
        if key not in compiled:
            # Tiles for other numbers of tokens are compiled at the first product, not while requests are served.
            compiled.add(key)
            first = operand._replace(x=operand.x[:1])
            for tile in dict.fromkeys(tile_of(tokens, y.shape[1], operand, device) for tokens in EVERY_TILE):
                launch(first, tile, y[:1])
        launch(operand, tile_of(len(x), y.shape[1], operand, device), y)

    def launch(operand: Operands, tile: Tile, y: Array) -> None:
        x, (tokens, out) = operand.x, y.shape
        blocks = triton.cdiv(out, tile.outputs)
        split, places, partial = tile.splits > 1, counters(blocks, x.device), None
        if split:
            partial = x.new_empty((tile.splits, tokens, out), dtype=torch.float32)
        grid = blocks, triton.cdiv(tokens, tile.tokens), tile.splits
        given = *operand.arrays, operand.bias, partial, places if split else None, y, y.stride(0)
        sizes = tokens, out, *operand.sizes, tile.cut
        cutting = {"whole": tile.cut >= operand.inputs, "n": tile.outputs, "m": tile.tokens}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        _multiply[grid](*given, *sizes, **operand.form, **cutting, **options)

    return product


@kernel(do_not_specialize=["tokens"])
def _multiply(
    x_at, x_stride, x_scales_at, values_at, values_stride, scales_at, minima_at, bias_at,
    partial_at, counters_at, y_at, y_stride,
    tokens, out, inputs, groups, group, cut,
    bits: tl.constexpr, fp8: tl.constexpr, eight: tl.constexpr, middle: tl.constexpr, grouped: tl.constexpr,
    has_minima: tl.constexpr, even: tl.constexpr, whole: tl.constexpr, n: tl.constexpr, m: tl.constexpr,
    k: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * n + tl.arange(0, n)
    token = tl.program_id(1) * m + tl.arange(0, m)
    # Outputs and tokens beyond the last are clamped to it, and not written.
    line = tl.minimum(output, out - 1).to(tl.int64)
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    mask = (token[:, None] < tokens) & (output[None, :] < out)
    x_rows = x_at + row * x_stride
    values_rows = values_at + line * values_stride
    scales_rows = scales_at
    minima_rows = minima_at
    if bits <= 8:
        scales_rows += line * groups
    if has_minima:
        minima_rows += line * groups
    none = tl.zeros((n, m), tl.int32 if eight and not (fp8 or grouped) else tl.float32)
    if partial_at is not None:
        begin = tl.program_id(2) * cut
        end = tl.minimum(begin + cut, inputs)
    else:
        begin = 0
        end = cut
    sums = span_products(
        none, x_rows, values_rows, scales_rows, minima_rows, begin, end, inputs, groups, group,
        bits, fp8, eight, middle, grouped, has_minima, even, k,
    )  # fmt: skip
    total = sums.to(tl.float32)
    if partial_at is not None:
        total = tl.trans(total)
        # The last program to arrive reads the sums of all cuts from memory. They are visible, because a barrier orders
        # the writes of a program's threads before its atomic count, which has release and acquire semantics, and
        # another barrier orders that before the reads (memory consistency model of PTX, causality order).
        splits = tl.num_programs(2)
        at = partial_at + row[:, None] * out + line[None, :]
        jump = tokens.to(tl.int64) * out
        tl.store(at + tl.program_id(2) * jump, total, mask=mask)
        tl.debug_barrier()
        count = counters_at + tl.program_id(0)
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.debug_barrier()
            total = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
            for other in range(1, splits):
                total += tl.load(at + other * jump, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(count, 0)
            _finish(total, x_scales_at, scales_rows, bias_at, y_at, y_stride, row, line, mask, eight, grouped)
    else:
        if not whole:
            for later in range(cut, inputs, cut):
                more = span_products(
                    none, x_rows, values_rows, scales_rows, minima_rows, later, tl.minimum(later + cut, inputs), inputs,
                    groups, group, bits, fp8, eight, middle, grouped, has_minima, even, k,
                )  # fmt: skip
                total += more.to(tl.float32)
        total = tl.trans(total)
        _finish(total, x_scales_at, scales_rows, bias_at, y_at, y_stride, row, line, mask, eight, grouped)


@triton.jit
def _finish(
    total, x_scales_at, scales_rows, bias_at, y_at, y_stride, row, line, mask,
    eight: tl.constexpr, grouped: tl.constexpr,
):  # fmt: skip
    if eight:
        if not grouped:
            total *= tl.load(scales_rows).to(tl.float32)[None, :]
        total *= tl.load(x_scales_at + row)[:, None]
    if bias_at is not None:
        total += tl.load(bias_at + line)[None, :]
    tl.store(y_at + row[:, None] * y_stride + line[None, :], total.to(y_at.dtype.element_ty), mask=mask)
