"""LoRA terms of a linear, in two Triton launches: down to each adapter's rank, and back up into the product.

The grouped products of Punica (Chen et al., 2023) and S-LoRA (Sheng et al., 2023), without group metadata on the host:
one program processes a block of tokens and iterates over their adapters. So a launch does not depend on the adapters,
may be captured, and reads only matrices of adapters in use, at the addresses in `LoraTable`, each with its own rank.
Matrices are the rows of the products and tokens their columns; each token is a separate column, summed in an order that
depends only on the linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Array

from fd_gpu_cuda.kernel_table import LoraTable
from fd_gpu_cuda.kernels.entry import cdiv, kernel, next_power_of_2

_RANK_TILE = 16
_OUTPUT_TILE = 64
_CUT = 1024
"""Inputs per cut, which is summed from zero; a multiple of every step."""
_FEW_TOKENS = 64
_LONGEST_RANK_STEP = 32
_LINE = 128
"""Bytes of a row per read: one cache line."""


class _Tile(NamedTuple):
    tokens: int
    shares: int
    """Programs that share the adapters of a block of tokens."""
    split: bool
    """True if each cut of the inputs has a separate program."""


_FEW = _Tile(16, 4, split=True)
_MANY = _Tile(64, 2, split=False)


def lora_addition() -> Callable[[Array, Array, LoraTable, Array], None]:
    """Return a function that adds adapters to y [T, out] for x [T, in] and slots int32[T], with any row strides.

    It does not synchronize. Its first call for a linear, possibly without tokens, compiles for all numbers of tokens.
    """
    compiled: set[Any] = set()

    def add(y: Array, x: Array, table: LoraTable, places: Array) -> None:
        tokens = len(x)
        if (key := (x.dtype, table.inputs, table.outs, table.width)) not in compiled:
            compiled.add(key)
            for tile in (_FEW, _MANY):
                _launch(y, x, table, places, 0, tile)  # reads and writes nothing
        if tokens:
            _launch(y, x, table, places, tokens, _FEW if tokens <= _FEW_TOKENS else _MANY)

    return add


def _launch(y: Array, x: Array, table: LoraTable, places: Array, tokens: int, tile: _Tile) -> None:
    parts, width, exact = len(table.outs), table.width, x.element_size() == 4
    cuts = cdiv(table.inputs, _CUT) if tile.split else 1
    blocks, shares = max(cdiv(tokens, tile.tokens), 1), max(min(tile.shares, tokens), 1)
    step = min(_LINE // x.element_size(), _CUT)
    sums = x.new_empty((cuts, max(tokens, 1), parts * width), dtype=torch.float32)
    found = places, table.entries, sums, tokens
    constants = {"parts": parts, "width": width, "m": tile.tokens}
    cutting = {"split": tile.split, "even": table.inputs % step == 0, "cut": _CUT, "n": _RANK_TILE, "k": step}
    grid = width // _RANK_TILE * parts * cuts, blocks, shares
    _shrink[grid](x, x.stride(0), *found, table.inputs, **constants, **cutting)
    n = _OUTPUT_TILE // 2 if exact else _OUTPUT_TILE
    k = min(next_power_of_2(width), _LONGEST_RANK_STEP)
    outs = (*table.outs, 0, 0)[:3]
    grid = sum(cdiv(out, n) for out in table.outs), blocks, shares
    _expand[grid](y, y.stride(0), *found, *outs, cuts, **constants, n=n, k=k)


@triton.jit
def _next(places, above):
    """Return the smallest slot above another, or a sentinel."""
    return tl.min(tl.where(places > above, places, 0x7FFFFFFF), 0)


@kernel(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["places_at"])
def _shrink(
    x_at, x_stride, places_at, entries_at, sums_at,
    tokens, inputs,
    parts: tl.constexpr, width: tl.constexpr, split: tl.constexpr, even: tl.constexpr, cut: tl.constexpr,
    n: tl.constexpr, m: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    """Write float32 sums [cuts, T, parts * width] of tokens with adapters, up to the rank of each."""
    part = tl.program_id(0) % parts
    piece = tl.program_id(0) // parts
    tiles: tl.constexpr = width // n
    first = piece % tiles * n
    rank = first + tl.arange(0, n)
    begin = 0
    if split:
        begin = piece // tiles * cut
    token = tl.program_id(1) * m + tl.arange(0, m)
    places = tl.load(places_at + token, mask=token < tokens, other=0)
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    x_rows = x_at + row * x_stride
    at = sums_at + row * (parts * width) + part * width
    if split:
        at += (piece // tiles).to(tl.int64) * tokens * (parts * width)
    place = _next(places, 0)
    turn = 0
    while place < 0x7FFFFFFF:
        entry = entries_at + ((place - 1) * parts + part) * 3
        ranks = tl.load(entry + 2).to(tl.int32)
        if (turn % tl.num_programs(2) == tl.program_id(2)) & (first < ranks):
            down_at = tl.multiple_of(tl.load(entry), 16).to(tl.pointer_type(x_at.dtype.element_ty))
            rows = down_at + tl.minimum(rank, ranks - 1).to(tl.int64) * inputs
            total = _products(x_rows, rows, begin, tl.minimum(begin + cut, inputs), inputs, even, n, m, k)
            if not split:
                for later in range(cut, inputs, cut):
                    end = tl.minimum(later + cut, inputs)
                    total += _products(x_rows, rows, later, end, inputs, even, n, m, k)
            mask = (places == place)[None, :] & (rank < ranks)[:, None]
            tl.store(at[None, :] + rank[:, None], total, mask=mask)
        turn += 1
        place = _next(places, place)


@triton.jit
def _products(x_rows, rows, begin, end, inputs, even: tl.constexpr, n: tl.constexpr, m: tl.constexpr, k: tl.constexpr):
    """Return the products [n, m] of inputs `begin` to `end`, summed in one order."""
    sums = tl.zeros((n, m), tl.float32)
    for at in range(begin, end, k):
        place = at + tl.arange(0, k)
        if even:
            matrix = tl.load(rows[:, None] + place[None, :])
            x = tl.load(x_rows[None, :] + place[:, None])
        else:
            matrix = tl.load(rows[:, None] + place[None, :], mask=place[None, :] < inputs, other=0.0)
            x = tl.load(x_rows[None, :] + place[:, None], mask=place[:, None] < inputs, other=0.0)
        sums = tl.dot(matrix, x, sums, input_precision="ieee")
    return sums


@kernel(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["places_at"])
def _expand(
    y_at, y_stride, places_at, entries_at, sums_at,
    tokens, first, second, third, cuts,
    parts: tl.constexpr, width: tl.constexpr, n: tl.constexpr, m: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    """Add the sums of cuts, round them to the activation dtype, multiply them by up, and add the result to y."""
    tile = tl.program_id(0)
    part = 0
    begin = 0
    out = first
    if parts > 1:
        tiles = tl.cdiv(first, n)
        is_later = tile >= tiles
        part = is_later.to(tl.int32)
        begin = tl.where(is_later, first, 0)
        out = tl.where(is_later, second, first)
        tile = tl.where(is_later, tile - tiles, tile)
    if parts > 2:
        tiles = tl.cdiv(second, n)
        is_later = (part == 1) & (tile >= tiles)
        part += is_later.to(tl.int32)
        begin = tl.where(is_later, first + second, begin)
        out = tl.where(is_later, third, out)
        tile = tl.where(is_later, tile - tiles, tile)
    output = tile * n + tl.arange(0, n)
    line = tl.minimum(output, out - 1)
    token = tl.program_id(1) * m + tl.arange(0, m)
    places = tl.load(places_at + token, mask=token < tokens, other=0)
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    at = sums_at + row * (parts * width) + part * width
    jump = tokens.to(tl.int64) * (parts * width)
    element = y_at.dtype.element_ty
    place = _next(places, 0)
    turn = 0
    while place < 0x7FFFFFFF:
        entry = entries_at + ((place - 1) * parts + part) * 3
        ranks = tl.load(entry + 2).to(tl.int32)
        if (turn % tl.num_programs(2) == tl.program_id(2)) & (ranks > 0):
            up_at = tl.multiple_of(tl.load(entry + 1), 16).to(tl.pointer_type(element))
            mine = places == place
            total = tl.zeros((n, m), tl.float32)
            for begun in range(0, ranks, k):
                rank = begun + tl.arange(0, k)
                mask = (rank < ranks)[:, None] & mine[None, :]
                sums = tl.load(at[None, :] + rank[:, None], mask=mask, other=0.0)
                for cut in range(1, cuts):
                    sums += tl.load(at[None, :] + rank[:, None] + cut * jump, mask=mask, other=0.0)
                matrix = tl.load(
                    up_at + rank[None, :].to(tl.int64) * out + line[:, None], mask=(rank < ranks)[None, :], other=0.0
                )
                total = tl.dot(matrix, sums.to(element), total, input_precision="ieee")
            mask = mine[:, None] & (output < out)[None, :]
            y_rows = y_at + row[:, None] * y_stride + (begin + output)[None, :]
            y = tl.load(y_rows, mask=mask, other=0.0).to(tl.float32) + tl.trans(total)
            tl.store(y_rows, y.to(element), mask=mask)
        turn += 1
        place = _next(places, place)
