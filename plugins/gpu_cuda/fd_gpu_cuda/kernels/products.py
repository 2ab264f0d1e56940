"""Products with weights in Triton, packed ones first.

One program computes a tile of outputs of some tokens. Inputs are cut at fixed places; what a cut adds is summed from
nothing, and the cuts' sums are added in their order, by one program or, where few tokens leave the device idle, by the
last of several that compute a cut each. So a row has the same bits alone and in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Array

from fd_gpu_cuda.kernels.entry import kernel
from fd_gpu_cuda.kernels.operands import Operands, operands, span_products
from fd_gpu_cuda.packed import PackedPart

WeightProduct = Callable[[Array, PackedPart | Array, Array], None]
"""Multiplies x [T, in] by a weight [out, in] into y [T, out], whose rows may lie apart; waits for nothing."""

_MOST_TOKENS = 128
_FEW_TOKENS = 32
_EVERY_TILE = (1, 32, 64, _MOST_TOKENS)
"""Numbers of tokens for each of which there is another tile."""
_SHORTEST_CUT = 512
"""Inputs; a multiple of every step."""
_PROGRAMS_A_MULTIPROCESSOR = 2
_LEFT = 2048
"""Bytes of shared memory that the stages leave to the rest of a program."""


class ProductDevice(NamedTuple):
    """What of a device decides about tiles."""

    multiprocessors: int
    shared_memory: int
    """Bytes that one block may have."""


class Tile(NamedTuple):
    """How one product is cut."""

    outputs: int
    tokens: int
    cut: int
    """Inputs that are summed from nothing."""
    splits: int
    """Programs that share the cuts of a tile of outputs; 1 computes all of them."""
    num_warps: int
    num_stages: int


def stages(operand: Operands, outputs: int, tokens: int, device: ProductDevice, most: int) -> int:
    """Return how many steps of a tile may be on their way at a time, which is bounded by the device's shared memory."""
    return max(1, min(most, (device.shared_memory - _LEFT) // operand.stage_bytes(outputs, tokens)))


def tile_of(tokens: int, out: int, operand: Operands, device: ProductDevice) -> Tile:
    """Choose a tile: as many tokens as there are, and of few tokens programs enough to keep all of memory busy.

    What is summed in which order depends on the weight and the device alone, never on the tokens. Tensor cores multiply
    16 outputs at a time, Hopper's 64, so that no tile has fewer.
    """
    exact = operand.bits == 32 or operand.x.dtype == torch.float32  # multiplied without tensor cores
    outputs = 16 if operand.bits == 32 else 32 if exact else 64
    columns = min(max(triton.next_power_of_2(tokens), 16), 64 if exact else _MOST_TOKENS)
    blocks = triton.cdiv(out, outputs)
    cuts = min(_PROGRAMS_A_MULTIPROCESSOR * device.multiprocessors // blocks, operand.inputs // _SHORTEST_CUT)
    cut, splits = operand.inputs, 1
    if cuts > 1:
        cut = triton.cdiv(triton.cdiv(operand.inputs, cuts), _SHORTEST_CUT) * _SHORTEST_CUT
        splits = triton.cdiv(operand.inputs, cut) if tokens <= _FEW_TOKENS else 1
    few = columns <= _FEW_TOKENS
    # Weights of 16 bits reach the tensor cores as they are, so a thread has registers for twice the sums.
    many = columns == _MOST_TOKENS and operand.bits != 16
    return Tile(
        outputs,
        columns,
        cut,
        splits,
        8 if many else 4,
        stages(operand, outputs, columns, device, 5 if few else 3),
    )


def weight_product(device: ProductDevice) -> WeightProduct:
    """Return the product on a device.

    It keeps a counter for each tile of outputs, which is 0 between launches; so its launches follow each other on one
    stream.
    """
    kept: dict[torch.device, Array] = {}
    compiled: set[Any] = set()

    def counters(count: int, place: torch.device) -> Array:
        # Made at the first product, which is before every capture; no split product has more tiles than this.
        if place not in kept:
            kept[place] = torch.zeros(_PROGRAMS_A_MULTIPROCESSOR * device.multiprocessors, dtype=torch.int32).to(place)
        return kept[place][:count]

    def product(x: Array, weight: PackedPart | Array, y: Array) -> None:
        operand = operands(x, weight)
        key = x.dtype, y.dtype, y.shape[1], operand.values.dtype, operand.inputs, tuple(operand.form.items())
        if key not in compiled:
            # Tiles for other numbers of tokens compile at the first product, or they would while requests are served.
            compiled.add(key)
            first = operand._replace(x=operand.x[:1])
            for tile in dict.fromkeys(tile_of(tokens, y.shape[1], operand, device) for tokens in _EVERY_TILE):
                launch(first, tile, y[:1])
        launch(operand, tile_of(len(x), y.shape[1], operand, device), y)

    def launch(operand: Operands, tile: Tile, y: Array) -> None:
        x, (tokens, out) = operand.x, y.shape
        blocks = triton.cdiv(out, tile.outputs)
        split, places, partial = tile.splits > 1, counters(blocks, x.device), None
        if split:
            partial = x.new_empty((tile.splits, tokens, out), dtype=torch.float32)
        _multiply[(blocks, triton.cdiv(tokens, tile.tokens), tile.splits)](
            operand.x,
            operand.x.stride(0),
            operand.x_scales,
            operand.values,
            operand.values.stride(0),
            operand.scales,
            operand.minima,
            operand.bias,
            partial,
            places if split else None,
            y,
            y.stride(0),
            tokens,
            out,
            operand.inputs,
            operand.groups,
            operand.group,
            tile.cut,
            **operand.form,
            split=split,
            whole=tile.cut >= operand.inputs,
            has_bias=operand.bias is not None,
            n=tile.outputs,
            m=tile.tokens,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    return product


@kernel(do_not_specialize=["tokens"])
def _multiply(
    x_at,
    x_stride,
    x_scales_at,
    values_at,
    values_stride,
    scales_at,
    minima_at,
    bias_at,
    partial_at,
    counters_at,
    y_at,
    y_stride,
    tokens,
    out,
    inputs,
    groups,
    group,
    cut,
    bits: tl.constexpr,
    fp8: tl.constexpr,
    eight: tl.constexpr,
    middle: tl.constexpr,
    grouped: tl.constexpr,
    has_minima: tl.constexpr,
    even: tl.constexpr,
    split: tl.constexpr,
    whole: tl.constexpr,
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
    if split:
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
    if split:
        total = tl.trans(total)
        # The cuts' sums meet in memory. Whoever comes last reads all of them: its count is read after every other
        # program's sums were written, because a barrier is between the writes of a program's threads and its counting,
        # counting releases what was written and acquires what the others released, and another barrier is between
        # that and the reads (memory consistency model of PTX, causality order).
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
            _finish(total, x_scales_at, scales_rows, bias_at, y_at, y_stride, row, line, mask, eight, grouped, has_bias)
    else:
        if not whole:
            for later in range(cut, inputs, cut):
                more = span_products(
                    none, x_rows, values_rows, scales_rows, minima_rows, later, tl.minimum(later + cut, inputs), inputs,
                    groups, group, bits, fp8, eight, middle, grouped, has_minima, even, k,
                )  # fmt: skip
                total += more.to(tl.float32)
        _finish(
            tl.trans(total),
            x_scales_at,
            scales_rows,
            bias_at,
            y_at,
            y_stride,
            row,
            line,
            mask,
            eight,
            grouped,
            has_bias,
        )


@triton.jit
def _finish(
    total,
    x_scales_at,
    scales_rows,
    bias_at,
    y_at,
    y_stride,
    row,
    line,
    mask,
    eight: tl.constexpr,
    grouped: tl.constexpr,
    has_bias: tl.constexpr,
):
    if eight:
        if not grouped:
            total *= tl.load(scales_rows).to(tl.float32)[None, :]
        total *= tl.load(x_scales_at + row)[:, None]
    if has_bias:
        total += tl.load(bias_at + line)[None, :]
    tl.store(y_at + row[:, None] * y_stride + line[None, :], total.to(y_at.dtype.element_ty), mask=mask)
