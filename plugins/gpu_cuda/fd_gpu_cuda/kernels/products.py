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

from fd_gpu_cuda.kernels.entry import cdiv, kernel, next_power_of_2
from fd_gpu_cuda.packed import LINE_BYTES, PackedPart

_ROW_TILE = 1024


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
    form: dict[str, Any]
    """Constants of `span_products`."""

    @property
    def bits(self) -> int:
        """Of a weight."""
        return int(self.form["bits"])

    @property
    def exact(self) -> bool:
        """True if it is multiplied without tensor cores."""
        return self.bits == 32 or self.x.dtype == torch.float32

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Operands, except the bias, with row strides."""
        return self.x, self.x.stride(0), self.x_scales, self.values, self.values.stride(0), self.scales, self.minima

    @property
    def sizes(self) -> tuple[int, int]:
        """Scalar arguments of `span_products`."""
        return self.inputs, self.groups


def operands(x: Array, weight: PackedPart | Array) -> Operands:
    """Return the kernel arguments for x [T, in] and a weight.

    Quantizes x to 8 bits, with a launch, if the weight requires it. An unpacked weight [out, in] may have any dtype: x
    is widened to it.
    """
    if not isinstance(weight, PackedPart):
        inputs = weight.shape[1]
        return Operands(x, None, weight, None, None, None, inputs, 1, _form(weight.itemsize * 8, inputs))
    part, x_scales, groups = weight, None, weight.scales.shape[1]
    if part.eight:
        x, x_scales = quantize_rows(x, torch.float8_e4m3fn if part.fp8 else torch.int8)
    values = part.values.view(x.dtype if part.eight else torch.int32)
    form = _form(part.bits, part.group) | {"fp8": part.fp8, "eight": part.eight, "middle": part.middle}
    form |= {"grouped": groups > 1, "has_minima": part.minima is not None}
    return Operands(x, x_scales, values, part.scales, part.minima, part.bias, part.inputs, groups, form)


def _form(bits: int, group: int) -> dict[str, Any]:
    """Return the constants for unpacked weights."""
    none = {"fp8": False, "eight": False, "middle": 0, "grouped": False, "has_minima": False}
    return {**none, "bits": bits, "group": group}


def step_constants(operand: Operands, k: int) -> dict[str, Any]:
    """Return the constants of `span_products` for steps of `k` inputs."""
    form = operand.form
    # The largest power of two that divides a group, if a step has more than one.
    span = min(form["group"] & -form["group"], k) if form["grouped"] else k
    return {**form, "k": k, "span": span, "even": operand.inputs % k == 0}


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
    sums, x_rows, present, values_rows, scales_rows, minima_rows, begin, end, inputs, groups,
    bits: tl.constexpr, fp8: tl.constexpr, eight: tl.constexpr, middle: tl.constexpr, grouped: tl.constexpr,
    has_minima: tl.constexpr, group: tl.constexpr, span: tl.constexpr, even: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    """Add the products of inputs `begin` to `end` to sums [n, m], `k` at a time and in one order.

    `x_rows` [m], `values_rows` [n], `scales_rows` [n] and `minima_rows` [n] point to where rows begin; `begin` is a
    multiple of k. Rows of x that are not `present` [m] are not read if few are, because they would take as long as the
    weights. With `eight`, the caller applies scales of rows and of x.
    """
    lane = tl.arange(0, k)
    x_at = x_rows[None, :] + lane[:, None]
    widened: tl.constexpr = bits <= 8 and not eight
    a_word: tl.constexpr = 32 // bits if widened else 1
    parts: tl.constexpr = k // span
    n: tl.constexpr = sums.shape[0]
    few: tl.constexpr = sums.shape[1] <= 32
    values_at = values_rows[:, None] + tl.arange(0, k // a_word)[None, :]
    if eight and grouped:
        # Loaded during the step before, because only copies of operands of products are queued ahead.
        scale = tl.load(scales_rows + begin // group)
    if widened and not grouped:
        scale = tl.load(scales_rows)[:, None]
        minimum = tl.load(minima_rows)[:, None] if has_minima else scale
    for at in range(begin, end, k):
        if bits <= 8 or even:
            # Packed rows end with zeros; others do not.
            values = tl.load(values_at + tl.multiple_of(at // a_word, k // a_word))
        else:
            values = tl.load(values_at + at, mask=at + lane[None, :] < inputs, other=0.0)
        if even and few:
            x = tl.load(x_at + at, mask=present[None, :], other=0.0)
        elif even:
            x = tl.load(x_at + at)
        else:
            x = tl.load(x_at + at, mask=present[None, :] & (at + lane[:, None] < inputs), other=0.0)
        if eight:
            if grouped:
                later = tl.load(scales_rows + tl.minimum((at + k) // group, groups - 1))
                sums += tl.dot(values, x).to(tl.float32) * scale.to(tl.float32)[:, None]
                scale = later
            elif fp8:
                # Tensor cores accumulate these products with few bits, so no sum is longer than a step. With
                # `max_num_imprecise_acc` Triton adds before it waits, and ptxas makes each instruction wait (C7515).
                sums += tl.dot(values, x)
            else:
                sums = tl.dot(values, x, sums, out_dtype=tl.int32)
        elif bits > 8:
            sums = tl.dot(values, x.to(values.dtype), sums, input_precision="ieee")
        else:
            words = tl.reshape(values, (n, parts, k // a_word // parts))
            if grouped:
                scales = _factors(scales_rows, at, groups, group, span, parts, even)
                minima = _factors(minima_rows, at, groups, group, span, parts, even) if has_minima else scales
                weights = _widened(words, scales, minima, x.dtype, bits, fp8, middle, has_minima)
            else:
                weights = _widened(words, scale, minimum, x.dtype, bits, fp8, middle, has_minima)
            # One product a step: Triton gives a second one another layout of sums.
            sums = tl.dot(tl.reshape(weights, (n, k)), x, sums, input_precision="ieee")
    return sums


@triton.jit
def _factors(
    rows, at, groups, group: tl.constexpr, span: tl.constexpr, parts: tl.constexpr, even: tl.constexpr
):  # fmt: skip
    """Return the scales or minima [n, parts] of the spans from input `at` on."""
    irregular: tl.constexpr = parts > 1 and span < group
    # Only copies of 4 bytes a thread are queued ahead: of float16, up to four factors are read for one.
    fewest: tl.constexpr = 4 if rows.dtype.element_ty == tl.float16 else 1
    wide: tl.constexpr = parts if irregular or parts > fewest else fewest
    step = at // (span * parts if irregular or parts > 1 else group)
    if irregular:
        index = (at // span + tl.arange(0, parts)) * span // group
    else:
        index = tl.multiple_of(step * parts // wide * wide, wide) + tl.arange(0, wide)
    if even:
        found = tl.load(rows[:, None] + index[None, :])
    else:
        found = tl.load(rows[:, None] + index[None, :], mask=index[None, :] < groups, other=0.0)
    if wide > parts:
        each = tl.reshape(found.to(tl.float32), (rows.shape[0], wide // parts, parts))
        mine = tl.arange(0, wide // parts) == step % (wide // parts)
        found = tl.sum(tl.where(mine[None, :, None], each, 0.0), 1).to(found.dtype)
    return found


@triton.jit
def _widened(
    words, scales, minima, element: tl.constexpr,
    bits: tl.constexpr, fp8: tl.constexpr, middle: tl.constexpr, has_minima: tl.constexpr,
):  # fmt: skip
    """Return the weights [n, k] of words int32[n, parts, words of a span], rounded to `element`.

    Words become the operand of tensor cores without an exchange between threads, see `packed.interleaved`.
    """
    n: tl.constexpr = words.shape[0]
    chunks: tl.constexpr = words.shape[1] * words.shape[2] // 4
    first = _four_inputs(words, scales, minima, 0, element, bits, fp8, middle, has_minima)
    if bits == 4:
        second = _four_inputs(words, scales, minima, 4, element, bits, fp8, middle, has_minima)
        weights = tl.reshape(tl.join(first, second), (n, chunks, 4, 2, 2, 2))
        weights = tl.permute(weights, (0, 1, 5, 4, 2, 3))
    else:
        weights = tl.permute(tl.reshape(first, (n, chunks, 4, 2, 2)), (0, 1, 4, 2, 3))
    return tl.reshape(weights, (n, chunks * 128 // bits))


@triton.jit
def _four_inputs(
    words, scales, minima, first: tl.constexpr, element: tl.constexpr,
    bits: tl.constexpr, fp8: tl.constexpr, middle: tl.constexpr, has_minima: tl.constexpr,
):  # fmt: skip
    """Return the weights [n, parts, words, 2, 2] of four values of each word, from value `first` on."""
    return tl.join(
        tl.join(
            _one_input(words, scales, minima, first, element, bits, fp8, middle, has_minima),
            _one_input(words, scales, minima, first + 1, element, bits, fp8, middle, has_minima),
        ),
        tl.join(
            _one_input(words, scales, minima, first + 2, element, bits, fp8, middle, has_minima),
            _one_input(words, scales, minima, first + 3, element, bits, fp8, middle, has_minima),
        ),
    )


@triton.jit
def _one_input(
    words, scales, minima, place: tl.constexpr, element: tl.constexpr,
    bits: tl.constexpr, fp8: tl.constexpr, middle: tl.constexpr, has_minima: tl.constexpr,
):  # fmt: skip
    factor = scales.to(tl.float32)[:, :, None]
    if fp8:
        # float32 with the same bits is 2^120 times smaller: its exponents begin at -126, not at -6.
        number = (((words << (24 - 8 * place)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)
        weight = number * 1.329227995784916e36 * factor
    else:
        # Conversions have a fraction of the rate of other instructions. So a value becomes bits `to` and up of a
        # float32 from `base` to 2 `base`, which is `base` larger. Two values of `to` save shifts of 4-bit words.
        to: tl.constexpr = 15 if bits == 8 else 16 - place % 2 * 4
        base: tl.constexpr = 2.0 ** (23 - to)
        left: tl.constexpr = to - bits * place
        moved = words << left if left >= 0 else words >> -left
        mask: tl.constexpr = (2**bits - 1) << to
        exponent: tl.constexpr = (150 - to) << 23
        # (moved & mask) | exponent, which the assembler does not combine by itself.
        code = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [moved, mask, exponent], tl.int32, is_pure=True, pack=1
        )
        number = code.to(tl.float32, bitcast=True)
        rounded_once: tl.constexpr = False if has_minima else scales.dtype == tl.float16
        if rounded_once:  # because both products are exact
            weight = number * factor - (base + middle) * factor
        else:
            weight = (number - (base + middle)) * factor
            if has_minima:
                weight += minima.to(tl.float32)[:, :, None]
    return weight.to(element)


WeightProduct = Callable[[Array, PackedPart | Array, Array], None]
"""Multiplies x [T, in] by a weight [out, in] into y [T, out], with any row strides; does not synchronize."""

MOST_TOKENS = 128
_FEW_TOKENS = 32
EVERY_TILE = (1, 32, 64, MOST_TOKENS)
"""Numbers of tokens with different tiles."""
_SHORTEST_CUT = 512
"""Inputs per cut; a multiple of every step."""
_PROGRAMS_A_MULTIPROCESSOR = 3
"""At most, if some share an output."""
_LEFT = 2048
"""Bytes of shared memory that the stages leave to the rest of a program."""
_TILES_TOGETHER = tl.constexpr(16)
_HOPPER_MEMORY = 200 * 1024
"""Bytes of shared memory that no device before Hopper has."""


class ProductDevice(NamedTuple):
    """Properties of a device that determine tiles."""

    multiprocessors: int
    shared_memory: int
    """Shared memory of a block in bytes."""

    @property
    def reads_shared(self) -> bool:
        """True if tensor cores read tokens from shared memory, as Hopper's do, not from registers."""
        return self.shared_memory >= _HOPPER_MEMORY


class Tile(NamedTuple):
    """Tiling of one product."""

    outputs: int
    tokens: int
    cut: int
    """Inputs per cut, which is summed from zero."""
    splits: int
    """Programs that share the cuts of a tile of outputs; 1 computes all of them."""
    k: int
    """Inputs per step; sums do not depend on it."""
    num_warps: int
    num_stages: int


def step_of(operand: Operands, tokens: int, device: ProductDevice) -> int:
    """Return the inputs that a tile multiplies at a time: a cache line of weights, as far as registers suffice."""
    if operand.exact and operand.bits <= 8:
        return 32
    # With eight groups a step, ptxas makes the instructions of the smallest tile wait for each other (C7515).
    few = tokens <= (_FEW_TOKENS if device.reads_shared or operand.bits == 4 else 16)
    few = few and (tokens > 16 or operand.form["group"] >= 64)
    if operand.form["eight"] or operand.bits > 8 or few:
        return LINE_BYTES * 8 // operand.bits
    return 128 if tokens <= 16 or device.reads_shared else 64


def widest(operand: Operands, device: ProductDevice) -> int:
    """Return the outputs of a tile of many tokens for eight warps.

    Four warps widen 64 outputs; eight would widen the same ones twice.
    """
    return 128 if device.reads_shared or not operand.form["eight"] else 64


def stages(operand: Operands, outputs: int, tokens: int, step: int, device: ProductDevice, most: int) -> int:
    """Return the number of pipeline stages of a tile, limited by the device's shared memory."""
    step_bytes = outputs * step * operand.bits // 8 + tokens * step * operand.x.element_size()
    return max(1, min(most, (device.shared_memory - _LEFT) // step_bytes))


def tile_of(tokens: int, out: int, operand: Operands, device: ProductDevice) -> Tile:
    """Choose a tile for the number of tokens, with enough programs to saturate memory for few tokens.

    The order of sums depends only on the weight and the device, never on the tokens. Tensor cores multiply 16 outputs
    at a time, Hopper's 64, so that no tile has fewer.
    """
    outputs = 16 if operand.bits == 32 else 32 if operand.exact else 64
    most = 32 if operand.exact and operand.bits <= 8 else 64 if operand.exact else MOST_TOKENS
    columns = min(max(next_power_of_2(tokens), 16), most)
    blocks = cdiv(out, outputs)
    cuts = [*range(_SHORTEST_CUT, operand.inputs, _SHORTEST_CUT), operand.inputs]

    def load(cut: int) -> tuple[int, int, int]:
        # Inputs of the multiprocessor with most programs; of equal ones, the most programs.
        programs = blocks * cdiv(operand.inputs, cut)
        surplus = max(programs - _PROGRAMS_A_MULTIPROCESSOR * device.multiprocessors, 0) if cut < operand.inputs else 0
        return surplus, cdiv(programs, device.multiprocessors) * cut, cut

    cut = min(cuts, key=load)
    splits = cdiv(operand.inputs, cut) if tokens <= _FEW_TOKENS else 1
    # 16-bit weights need no registers for widening, so four warps have twice the sums.
    many = columns == MOST_TOKENS and operand.bits != 16
    outputs, step = widest(operand, device) if many else outputs, step_of(operand, columns, device)
    count = stages(operand, outputs, columns, step, device, 5 if columns <= _FEW_TOKENS and step <= 128 else 3)
    return Tile(outputs, columns, cut, splits, step, 8 if many else 4, count)


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
        blocks = cdiv(out, tile.outputs)
        split, places, partial = tile.splits > 1, counters(blocks, x.device), None
        if split:
            partial = x.new_empty((tile.splits, tokens, out), dtype=torch.float32)
        grid = blocks * cdiv(tokens, tile.tokens), tile.splits
        given = *operand.arrays, operand.bias, partial, places if split else None, y, y.stride(0)
        sizes = tokens, out, *operand.sizes, tile.cut
        cutting = {"whole": tile.cut >= operand.inputs, "n": tile.outputs, "m": tile.tokens}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        _multiply[grid](*given, *sizes, **step_constants(operand, tile.k), **cutting, **options)

    return product


@kernel(do_not_specialize=["tokens"])
def _multiply(
    x_at, x_stride, x_scales_at, values_at, values_stride, scales_at, minima_at, bias_at,
    partial_at, counters_at, y_at, y_stride,
    tokens, out, inputs, groups, cut,
    bits: tl.constexpr, fp8: tl.constexpr, eight: tl.constexpr, middle: tl.constexpr, grouped: tl.constexpr,
    has_minima: tl.constexpr, group: tl.constexpr, span: tl.constexpr, even: tl.constexpr, whole: tl.constexpr,
    n: tl.constexpr, m: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time share weights and up to `_TILES_TOGETHER` tiles of tokens.
    blocks = tl.cdiv(out, n)
    before = tl.program_id(0) // (_TILES_TOGETHER * blocks) * _TILES_TOGETHER
    tiles = tl.minimum(tl.cdiv(tokens, m) - before, _TILES_TOGETHER)
    place = tl.program_id(0) - before * blocks
    block = place // tiles
    output = block * n + tl.arange(0, n)
    token = (before + place % tiles) * m + tl.arange(0, m)
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
        begin = tl.program_id(1) * cut
        end = tl.minimum(begin + cut, inputs)
    else:
        begin = 0
        end = cut
    sums = span_products(
        none, x_rows, token < tokens, values_rows, scales_rows, minima_rows, begin, end, inputs, groups,
        bits, fp8, eight, middle, grouped, has_minima, group, span, even, k,
    )  # fmt: skip
    total = sums.to(tl.float32)
    if partial_at is not None:
        total = tl.trans(total)
        # The last program to arrive reads the sums of all cuts from memory. They are visible, because a barrier orders
        # the writes of a program's threads before its atomic count, which has release and acquire semantics, and
        # another barrier orders that before the reads (memory consistency model of PTX, causality order).
        splits = tl.num_programs(1)
        at = partial_at + row[:, None] * out + line[None, :]
        jump = tokens.to(tl.int64) * out
        tl.store(at + tl.program_id(1) * jump, total, mask=mask)
        tl.debug_barrier()
        count = counters_at + block
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
                    none, x_rows, token < tokens, values_rows, scales_rows, minima_rows, later,
                    tl.minimum(later + cut, inputs), inputs, groups,
                    bits, fp8, eight, middle, grouped, has_minima, group, span, even, k,
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
