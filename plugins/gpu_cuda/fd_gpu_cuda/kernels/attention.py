"""Paged attention in Triton: one kernel for rows of few tokens, and one for prompts and chunks of prompts.

The kernel of a row depends only on its number of tokens, as a decode or a part of a prompt, so the bits of its
attention do not depend on other rows.

Exponents are of base 2. For sums of two products, `fma` states which one is rounded: the compiler's choice could differ
between kernels, and change the bits of a row that is computed in pieces.

Decodes are known as flash-decoding (Dao, Haziza, Massa and Sizov, 2023): the context of a row is divided among
programs. The keys of all rows are a list that is cut into equal shares, as in Stream-K (Osama et al., 2023), so a long
row among short ones fills the device. Programs read the lengths, so a captured grid fits any.

Keys are cut into chunks at fixed positions. Each chunk is summed from zero in float32, and sums of chunks are always
folded in order: by the single program of an undivided row, or by the last of several to finish. So the bits of a row do
not depend on the batch, nor on the number of programs or the device.

The last program is determined by a counter (`logits` explains why it sees the stores of the others), which it resets
for the next launch. Launches that share a workspace are on one stream, so they do not overlap.

Of prompts, one program computes one tile of queries of one row for one KV head; the query heads that share the KV head
are adjacent in the tile. It iterates over tiles of keys with a running softmax in float32 (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", NeurIPS 2022). Tiles of keys that are
visible to all queries need no mask. The order of a row's tiles never depends on the batch.

Keys of a prompt are cut into spans, as those of a decode into chunks. Where a step has few queries for its keys, as in
a short suffix of a long cached prefix, several programs share the spans of a tile.

Of latent heads, which share one vector for each token, a program computes some as if these had a KV head of their own.
The vector is two tiles: its rotated part, which only scores use, and the latent value.

The bits are determined by the grouping of keys in sums, which depends only on the model. Device-specific tuning, such
as loads in flight and programs per row, does not affect them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from fd_core.config import EngineConfig
from fd_core.ops.contract import Array, Heads, HostStep, StepInput

from fd_gpu_cuda.kernels.entry import cdiv, kernel, next_power_of_2
from fd_gpu_cuda.kernels.logits import is_last
from fd_gpu_cuda.kv_cache import CudaLayer

CHUNK: Final = 256
"""Keys per chunk that is summed from zero, by position."""
LARGE_CHUNK: Final = 1024
LARGE_FROM: Final = 8192
"""Position from which chunks are larger, because long rows have enough of them, to fold fewer sums."""
MOST_DRAFTED: Final = 1 + EngineConfig(model="any").max_forced_tokens
"""Tokens of a row up to which it counts as a decode: one, and the drafts of a grammar unless set otherwise."""

_LINES: Final = 16
"""Minimum number of lines of a tensor core product."""
_PREFILL_LINES: Final = 128
_TILE_BYTES: Final = 16 * 1024
"""Bytes of one tile of keys, or of values, of a decode."""
_MOST_KEYS: Final = 128
_STAGES: Final = 4
_HOPPER_BYTES: Final = 200 * 1024
_RESERVED_BYTES: Final = 18 * 1024
"""Shared memory for weights, reductions and scales in addition to the tiles."""

SPAN: Final = 1024
"""Keys per span of a prompt, which is summed from zero, by position."""
LARGE_SPAN: Final = 4096
"""The same from `LARGE_FROM` on: each span costs a prompt of one program the time of about 100 keys."""


class Tile(NamedTuple):
    """Tile that one program holds at a time."""

    queries: int
    """Tokens of one row."""
    lines: int
    """Tokens times the query heads that share a KV head, rounded up to the product size."""
    keys: int
    num_warps: int
    num_stages: int
    """Pipeline stages: tiles of keys and values in flight, plus the one that is computed."""


def _padded(width: int) -> int:
    return max(_LINES, next_power_of_2(width))


class HeadSizes(NamedTuple):
    """Properties that determine a tile."""

    shared: int
    """Query heads that share a KV head."""
    width: int
    """Elements of a value."""
    kv_bytes: int
    """Bytes of an element of a key."""
    q_bytes: int
    windowed: bool = False
    rotated: int = 0
    """Elements of a latent key before the value; 0 for other keys."""

    @property
    def padded(self) -> int:
        """Elements of a value in a tile."""
        return _padded(self.width)

    @property
    def query(self) -> int:
        """Elements of a query in tiles."""
        return self.padded + (_padded(self.rotated) if self.rotated else 0)

    @property
    def pair(self) -> int:
        """Elements of a key and its value in tiles."""
        return self.query if self.rotated else 2 * self.padded

    @property
    def masked(self) -> bool:
        """True if a tile has elements beyond the head, whose loads hold a mask in registers."""
        return self.padded != self.width or (self.rotated > 0 and self.query - self.padded != self.rotated)

    @property
    def exact(self) -> bool:
        """True if products are in float32, which has no tensor cores."""
        return self.q_bytes == 4

    @property
    def widened(self) -> bool:
        """True if keys have fewer bits than queries."""
        return self.kv_bytes < self.q_bytes


@cache
def decode_tile(sizes: HeadSizes, shared_memory: int) -> Tile:
    """Return the tiling of a row of few tokens; `shared_memory` is the limit of a program in bytes.

    Most rows have one token, so a tile has the fewest lines. The tiles of a row run at the same time and read its keys
    from the L2 cache. The limits of registers were found by compiling.
    """
    queries = max(1, min(MOST_DRAFTED, _LINES // sizes.shared))
    lines = max(_LINES, next_power_of_2(queries * sizes.shared))
    # 8-bit values are converted to the queries' type before products.
    keys = min(max(_TILE_BYTES // (sizes.padded * max(sizes.kv_bytes, sizes.q_bytes)), _LINES), _MOST_KEYS)
    warps = 8 if sizes.exact else 4
    if sizes.exact:
        keys = 32 if sizes.masked and not sizes.widened else _LINES
    return Tile(queries, lines, keys, warps, _stages(sizes, lines, keys, shared_memory))


@cache
def prefill_tile(sizes: HeadSizes, shared_memory: int) -> Tile:
    """Return the tiling of a row of many tokens.

    These are the largest tiles that fit in registers: narrow heads without a window and without widening have more
    lines, wide, masked and widened heads fewer keys.
    """
    lines, keys = _PREFILL_LINES // 2, 32 if sizes.padded > 128 or (sizes.masked and sizes.widened) else 64
    if sizes.padded > 256:
        lines = _PREFILL_LINES // 4
    if sizes.exact:
        lines, keys = _LINES, _LINES
    elif sizes.padded > 128 and sizes.widened:
        keys = _LINES
    elif sizes.padded <= 128 and not sizes.windowed and not sizes.widened:
        lines = _PREFILL_LINES
    lines = max(lines, next_power_of_2(sizes.shared))
    return Tile(lines // sizes.shared, lines, keys, 8, _prefill_stages(sizes, lines, keys, shared_memory))


def _prefill_stages(sizes: HeadSizes, lines: int, keys: int, shared_memory: int) -> int:
    """Return the number of stages that fit, at most 2 on Hopper: with more, ptxas serializes the products (C7515)."""
    if sizes.exact and (sizes.masked or (sizes.widened and sizes.padded > 128)):
        return 1  # as in `_stages`
    pair, queries = keys * sizes.pair * sizes.kv_bytes, lines * sizes.query * sizes.q_bytes
    free = shared_memory - _RESERVED_BYTES - queries
    if shared_memory >= _HOPPER_BYTES:
        return 2 if 2 * pair <= free else 1
    return max(1, min(3, free // pair + 1))


def _stages(sizes: HeadSizes, lines: int, keys: int, shared_memory: int) -> int:
    """Return 4 stages if they fit, else 1: fewer than 4 need no less, because blocks are looked up two stages ahead.

    On Hopper, operands of products and queries need separate buffers while the next tiles load. Masked float32 loads
    are not pipelined, because pending masks would not fit in registers.
    """
    if sizes.exact and (sizes.masked or (sizes.widened and sizes.padded > 128)):
        return 1
    pair, queries = keys * sizes.pair * sizes.kv_bytes, lines * sizes.query * sizes.q_bytes
    needed = 3 * pair + queries if shared_memory >= _HOPPER_BYTES else max(2 * pair, queries)
    return _STAGES if needed + _RESERVED_BYTES <= shared_memory else 1


LOG2_E = 1.4426950408889634
"""Factor that turns a score into an exponent of base 2."""
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def load_tile(
    keys_at, values_at, key_scales_at, value_scales_at, table_at,
    key, kv_head,
    block_size: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, d: tl.constexpr, rotated: tl.constexpr,
    r: tl.constexpr,
):  # fmt: skip
    """Load keys and values [n, d] of one KV head at valid positions [n], and their scales [n].

    Of latent heads, with `rotated` elements before the values, keys are those alone: [n, r].
    """
    return load_slots(
        keys_at, values_at, key_scales_at, value_scales_at, tl.load(table_at + key // block_size), key, kv_head,
        block_size, kv_heads, width, d, rotated, r,
    )  # fmt: skip


@triton.jit
def load_slots(
    keys_at, values_at, key_scales_at, value_scales_at, block, key, kv_head,
    block_size: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, d: tl.constexpr, rotated: tl.constexpr,
    r: tl.constexpr,
):  # fmt: skip
    """Load as `load_tile` does, from known blocks [n]."""
    place = block.to(tl.int64) * block_size + key % block_size
    if rotated:
        keys = _load_lines(keys_at, place, rotated, r)
    else:
        place = place * kv_heads + kv_head
        keys = _load_lines(keys_at, place, width, d)
    values = _load_lines(values_at, place, width, d)
    key_scale = tl.load(key_scales_at + place) if key_scales_at is not None else 1.0
    value_scale = tl.load(value_scales_at + place) if value_scales_at is not None else 1.0
    return keys, values, key_scale, value_scale


@triton.jit
def _load_lines(at, line, width: tl.constexpr, d: tl.constexpr):
    """Load lines [n] of `width` elements, as [n, d]."""
    column = tl.arange(0, d)
    at += line[:, None] * width + column[None, :]
    if width == d:
        return tl.load(at)
    return tl.load(at, mask=(column < width)[None, :], other=0.0)


@triton.jit
def attend_tile(
    largest, total, sums, q, turned, keys, values, key_scale, value_scale, seen, factor, cap,
    masked: tl.constexpr, quantized: tl.constexpr, rotated: tl.constexpr,
):  # fmt: skip
    """Accumulate one tile into a running softmax: largest and total [m], sums [m, d].

    q: [m, d]; keys and values: [n, d]; seen: [m, n], read if `masked`. Of latent heads, the keys are values, preceded
    by `keys` [n, r], and the queries q, preceded by `turned` [m, r]. Scores are products of q and keys times
    `factor`, an exponent of base 2. Or, with `cap`, tanh(product * factor) times `cap`, which has the base in it.
    """
    if rotated:
        scores = tl.dot(q, tl.trans(values.to(q.dtype)), input_precision="ieee")
        if quantized:
            scores *= value_scale[None, :]
            more = tl.dot(turned, tl.trans(keys.to(q.dtype)), input_precision="ieee")
            scores = tl.fma(more, tl.broadcast_to(key_scale[None, :], more.shape), scores)
        else:
            scores = tl.dot(turned, tl.trans(keys.to(q.dtype)), scores, input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        if quantized:
            scores *= key_scale[None, :]
    if cap is not None:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = 2.0 * tl.sigmoid(scores * (2.0 * factor)) - 1.0
        factor = cap
    exponents = scores * factor
    if masked:
        exponents = tl.where(seen, exponents, -float("inf"))
    higher = tl.maximum(largest, tl.max(exponents, 1))
    # The largest score of a line without keys is -inf: subtract 0 instead.
    shift = tl.where(higher == -float("inf"), 0.0, higher) if masked else higher
    weights = tl.exp2(exponents - shift[:, None])
    shrink = tl.exp2(largest - shift)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    if quantized:
        if q.dtype == tl.float16:
            # A weight times a scale may underflow float16.
            values = (values.to(tl.float32) * value_scale[:, None]).to(tl.float16)
        else:
            weights *= value_scale[None, :]
    sums = tl.dot(weights.to(q.dtype), values.to(q.dtype), sums * shrink[:, None], input_precision="ieee")
    return higher, total, sums


@triton.jit
def fold(largest, total, sums, more_largest, more_total, more_sums):
    """Merge two softmaxes over disjoint keys: largest and total [m], sums [m, d]; one without keys is neutral."""
    higher = tl.maximum(largest, more_largest)
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    own = tl.exp2(largest - shift)
    more = tl.exp2(more_largest - shift)
    total = tl.fma(more_total, more, total * own)
    sums = tl.fma(more_sums, tl.broadcast_to(more[:, None], sums.shape), sums * own[:, None])
    return higher, total, sums


@triton.jit
def averaged(largest, total, sums, sinks_at, head):
    """Divide the sums [m, d] over all keys by their weights; a sink is one more, whose value is 0. `head`: [m]."""
    if sinks_at is not None:
        # Infinite if it exceeds all keys by 2^128: then their share is 0.
        total += tl.exp2(tl.load(sinks_at + head) * _LOG2_E - largest)
    return sums / tl.where(total > 0.0, total, 1.0)[:, None]


_PROGRAMS: Final = 2
"""Shares per multiprocessor, which keep enough loads in flight."""
_SUMS_BYTES: Final = 2**20
"""Workspace of a share for sums of chunks: of four heads of 128, 496 of one token, or 41 of nine. A row whose sums need
more than its shares have is not divided.
"""
_FOLDED_ELEMENTS: Final = 4096
"""Elements of sums loaded at once for folding, limited by registers."""
_MOST_FOLDED: Final = 16
_SCANNED: Final = 256
"""Rows whose lengths a program reads at once."""

_CHUNK = tl.constexpr(CHUNK)
_LARGE_CHUNK = tl.constexpr(LARGE_CHUNK)
_LARGE_FROM = tl.constexpr(LARGE_FROM)


def _scaling(heads: Heads) -> tuple[float, float | None, int | None]:
    """Return `factor` and `cap` of `attend_tile`, and the window."""
    if heads.softcap is None:
        return heads.scale * LOG2_E, None, heads.window
    return heads.scale * (1 / heads.softcap), heads.softcap * LOG2_E, heads.window


def _constants(layer: CudaLayer, heads: Heads, tile: Tile) -> dict[str, int]:
    return {
        "block_size": layer.block_size,
        "kv_heads": heads.num_kv_heads,
        "shared": heads.num_heads // heads.num_kv_heads,
        "width": heads.latent or heads.head_dim,
        "tile": tile.queries,
        "m": tile.lines,
        "n": tile.keys,
        "d": _padded(heads.latent or heads.head_dim),
        "rotated": heads.head_dim - heads.latent if heads.latent else 0,
        "r": _padded(heads.head_dim - heads.latent),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@triton.jit
def _chunk_of(key):
    small: tl.constexpr = _LARGE_FROM // _CHUNK
    return tl.where(key < _LARGE_FROM, key // _CHUNK, small + (key - _LARGE_FROM) // _LARGE_CHUNK)


@triton.jit
def _origin(count, context, window):
    """Return the start of the first chunk of a row."""
    first = tl.maximum(0, context - count - window + 1) if window is not None else context * 0
    return tl.where(first < _LARGE_FROM, first // _CHUNK * _CHUNK, first // _LARGE_CHUNK * _LARGE_CHUNK)


@triton.jit
def _pieces_of(count, context, window, most):
    """Return the pieces of `CHUNK` keys that a row attends to: its share of the work. Prompts have none."""
    pieces = tl.cdiv(context - _origin(count, context, window), _CHUNK)
    return tl.where((count > 0) & (count <= most), pieces, 0)


@triton.jit
def _pieces(query_start_at, context_at, row, rows, window, most):
    """Return the pieces of each row [n], 0 from `rows` on."""
    known = row < rows
    start = tl.load(query_start_at + row, mask=known, other=0)
    count = tl.load(query_start_at + row + 1, mask=known, other=0) - start
    return _pieces_of(count, tl.load(context_at + row, mask=known, other=0), window, most)


@triton.jit
def _whole_chunks(key):
    """Return the start of the first chunk at or after the start of a piece."""
    return tl.where(key < _LARGE_FROM, key, tl.cdiv(key, _LARGE_CHUNK) * _LARGE_CHUNK)


@kernel(
    do_not_specialize=["table_stride", "rows", "tiles", "most", "capacity", "window"],
    do_not_specialize_on_alignment=["query_start_at", "context_at", "tables_at"],
)
def _decode(
    q_at, keys_at, values_at, key_scales_at, value_scales_at, output_at, sinks_at, sums_at, counters_at,
    query_start_at, context_at, tables_at, table_stride,
    rows, tiles, most, capacity, factor, cap, window,
    block_size: tl.constexpr, kv_heads: tl.constexpr, shared: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
    m: tl.constexpr, n: tl.constexpr, d: tl.constexpr, rotated: tl.constexpr, r: tl.constexpr,
    few: tl.constexpr, folded: tl.constexpr, scanned: tl.constexpr,
):  # fmt: skip
    """Attend with one KV head and tile to one share of the keys. Grid: shares times KV heads times tiles of a row.

    The keys of all rows are a list of pieces, which is cut into equal shares. A program computes the rows in its share
    one after another, of which the first and the last may be parts.
    """
    units = kv_heads * tiles
    unit = tl.program_id(0) % units
    kv_head = unit // tiles
    begin = unit % tiles * tile
    shares = tl.num_programs(0) // units
    index = tl.arange(0, scanned)
    work = 0
    for block in range(0, rows, scanned):
        work += tl.sum(_pieces(query_start_at, context_at, block + index, rows, window, most), 0)
    share = tl.cdiv(work, shares)
    piece = tl.program_id(0) // units * share
    end = tl.minimum(piece + share, work)
    # The row of the first piece, and the pieces before that row.
    row = 0
    row_begin = 0
    before = 0
    for block in range(0, rows, scanned):
        upto = before + tl.cumsum(_pieces(query_start_at, context_at, block + index, rows, window, most), 0)
        past = (upto <= piece) & (block + index < rows)
        row += tl.sum(past.to(tl.int32), 0)
        row_begin = tl.maximum(row_begin, tl.max(tl.where(past, upto, 0), 0))
        before = tl.max(upto, 0)
    while piece < end:
        start = tl.load(query_start_at + row)
        count = tl.load(query_start_at + row + 1) - start
        context = tl.load(context_at + row)
        row_end = row_begin + _pieces_of(count, context, window, most)
        # Union of the keys that tokens of this tile attend to: [first, last).
        last = tl.minimum(context, context - count + begin + tile)
        first = tl.maximum(0, context - count + begin - window + 1) if window is not None else 0
        first_chunk = _chunk_of(first)
        chunks = _chunk_of(last - 1) + 1 - first_chunk
        # One row at most crosses the end of a share, so it has the counter and the workspace of that share, and the
        # workspace of all others whose ends it crosses.
        first_share = row_begin // share
        crossed = (row_end - 1) // share - first_share
        lines = tl.minimum(tile, count - begin) * shared
        divided = (crossed > 0) & (chunks * lines <= crossed * capacity)
        if (begin < count) & (row_end > row_begin) & (divided | (piece == row_begin)):
            line = tl.arange(0, m)
            query = begin + line // shared
            live = (line < tile * shared) & (query < count)
            place = context - count + query
            column = tl.arange(0, d)
            inside = column < width
            head = kv_head * shared + line % shared
            q_line = ((start + query) * (kv_heads * shared) + head).to(tl.int64)
            q_mask = live[:, None] & inside[None, :]
            q, turned = _load_queries(q_at, q_line, live, width, d, rotated, r)

            # Of all folded chunks, and of the current one.
            all_largest = tl.full((m,), -float("inf"), tl.float32)
            all_total = tl.zeros((m,), tl.float32)
            all_sums = tl.zeros((m, d), tl.float32)
            largest = tl.full((m,), -float("inf"), tl.float32)
            total = tl.zeros((m,), tl.float32)
            sums = tl.zeros((m, d), tl.float32)
            table_at = tables_at + tl.cast(row, tl.int64) * table_stride
            own = unit * shares + first_share
            # Of each line: the sums, the largest exponent and the total, aligned to 16 bytes.
            chunks_at = sums_at + own.to(tl.int64) * capacity * (d + 4)
            origin = _origin(count, context, window)
            to_piece = tl.where(divided, tl.minimum(end, row_end), row_end) - row_begin
            from_key = tl.maximum(_whole_chunks(origin + (piece - row_begin) * _CHUNK), first // n * n)
            to_key = tl.minimum(_whole_chunks(origin + to_piece * _CHUNK), last)
            for base in range(from_key, to_key, n):
                key = base + tl.arange(0, n)
                # Table entries beyond the visible keys are undefined: indices are clamped.
                known = tl.minimum(tl.maximum(key, first), last - 1)
                keys, values, key_scale, value_scale = load_tile(
                    keys_at, values_at, key_scales_at, value_scales_at, table_at, known, kv_head,
                    block_size, kv_heads, width, d, rotated, r,
                )  # fmt: skip
                seen = key[None, :] <= place[:, None]
                if window is not None:
                    seen = seen & (place[:, None] - key[None, :] < window)
                largest, total, sums = attend_tile(
                    largest, total, sums, q, turned, keys, values, key_scale, value_scale, seen, factor, cap,
                    True, key_scales_at is not None, rotated,
                )  # fmt: skip
                stop = base + n
                if (stop >= to_key) | (stop % tl.where(stop <= _LARGE_FROM, _CHUNK, _LARGE_CHUNK) == 0):
                    if divided:
                        line_at = chunks_at + ((_chunk_of(base) - first_chunk) * lines + line) * (d + 4)
                        tl.store(line_at[:, None] + column[None, :], sums, mask=live[:, None])
                        tl.store(line_at + d, largest, mask=live)
                        tl.store(line_at + (d + 1), total, mask=live)
                    else:
                        all_largest, all_total, all_sums = fold(all_largest, all_total, all_sums, largest, total, sums)
                    largest = tl.full((m,), -float("inf"), tl.float32)
                    total = tl.zeros((m,), tl.float32)
                    sums = tl.zeros((m, d), tl.float32)
            if divided:
                if is_last(counters_at, own, crossed + 1):
                    for token in range(tl.minimum(tile, count - begin)):
                        token_line = (start + begin + token) * kv_heads + kv_head
                        _fold_chunks(
                            chunks_at + token * (shared * (d + 4)), output_at, sinks_at,
                            chunks, lines, kv_head, token_line.to(tl.int64) * (shared * width),
                            shared, width, d, few, folded,
                        )  # fmt: skip
            else:
                result = averaged(all_largest, all_total, all_sums, sinks_at, head).to(output_at.dtype.element_ty)
                tl.store(output_at + q_line[:, None] * width + column[None, :], result, mask=q_mask)
        row += 1
        row_begin = row_end
        piece = row_end


@triton.jit
def _load_queries(q_at, line, live, width: tl.constexpr, d: tl.constexpr, rotated: tl.constexpr, r: tl.constexpr):
    """Load the queries of lines int64[m], and the rotated parts [m, r] of latent ones: the rest is [m, d]."""
    column = tl.arange(0, d)
    at = q_at + line[:, None] * (rotated + width)
    q = tl.load(at + rotated + column[None, :], mask=live[:, None] & (column < width)[None, :], other=0.0)
    turned = q
    if rotated:
        column = tl.arange(0, r)
        turned = tl.load(at + column[None, :], mask=live[:, None] & (column < rotated)[None, :], other=0.0)
    return q, turned


@triton.jit
def _fold_chunks(
    chunks_at, output_at, sinks_at, chunks, lines, kv_head, output_line,
    shared: tl.constexpr, width: tl.constexpr, d: tl.constexpr, few: tl.constexpr, folded: tl.constexpr,
):  # fmt: skip
    """Fold the chunks of one token in order, with several loads at once, and write the result."""
    line = tl.arange(0, few)
    column = tl.arange(0, d)
    live = line < shared
    largest = tl.full((few,), -float("inf"), tl.float32)
    total = tl.zeros((few,), tl.float32)
    sums = tl.zeros((few, d), tl.float32)
    for begin in range(0, chunks, folded):
        for step in tl.static_range(folded):
            chunk = begin + step
            there = live & (chunk + line * 0 < chunks)
            line_at = chunks_at + (chunk * lines + line) * (d + 4)
            more = tl.load(line_at[:, None] + column[None, :], mask=there[:, None], other=0.0)
            more_largest = tl.load(line_at + d, mask=there, other=-float("inf"))
            more_total = tl.load(line_at + (d + 1), mask=there, other=0.0)
            largest, total, sums = fold(largest, total, sums, more_largest, more_total, more)
    head = kv_head * shared + tl.minimum(line, shared - 1)
    result = averaged(largest, total, sums, sinks_at, head)
    at = output_line + line[:, None] * width + column[None, :]
    mask = live[:, None] & (column < width)[None, :]
    tl.store(output_at + at, result.to(output_at.dtype.element_ty), mask=mask)


@triton.jit
def _row_of(program, query_start_at, rows, tile: tl.constexpr):
    """Return the last row that begins at or before this tile."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_at + middle) // tile + middle <= program:
            low = middle
        else:
            high = middle
    return low


def span_of(key: int) -> int:
    """Return the span of a position."""
    if key < LARGE_FROM:
        return key // SPAN
    return LARGE_FROM // SPAN + (key - LARGE_FROM) // LARGE_SPAN


class Division(NamedTuple):
    """Division of the keys of a step's prompts among programs."""

    share: int
    """Positions per program, a multiple of `SPAN`; a program sums the spans that begin in its share."""
    programs: int
    """Maximum number of programs of a tile."""
    spans: int
    """Maximum number of spans of a tile that is divided."""


_UNDIVIDED: Final = Division(2**30, 1, 1)
_PROMPT_PROGRAMS: Final = 2
"""Programs per multiprocessor from which keys of prompts are not divided further."""

_SPAN = tl.constexpr(SPAN)
_LARGE_SPAN = tl.constexpr(LARGE_SPAN)


@triton.jit
def _span_of(key):
    small: tl.constexpr = _LARGE_FROM // _SPAN
    return tl.where(key < _LARGE_FROM, key // _SPAN, small + (key - _LARGE_FROM) // _LARGE_SPAN)


@triton.jit
def _span_start(span):
    small: tl.constexpr = _LARGE_FROM // _SPAN
    return tl.where(span < small, span * _SPAN, _LARGE_FROM + (span - small) * _LARGE_SPAN)


@triton.jit
def _divided_before(row, query_start_at, context_at, least, share, window, tile: tl.constexpr):
    """Return the number of tiles of earlier rows whose keys are divided."""
    tiles = 0
    for base in range(0, row, 64):
        each = base + tl.arange(0, 64)
        earlier = each < row
        start = tl.load(query_start_at + each, mask=earlier, other=0)
        count = tl.load(query_start_at + each + 1, mask=earlier, other=0) - start
        context = tl.load(context_at + each, mask=earlier, other=0)
        first = tl.maximum(0, context - count - window + 1) if window is not None else 0
        divided = (count >= least) & ((context - 1) // share > first // share)
        tiles += tl.sum(tl.where(divided, tl.cdiv(count, tile), 0), 0)
    return tiles


@triton.jit
def _prompt_lines(query_start_at, row, begin, tile: tl.constexpr, shared: tl.constexpr, m: tl.constexpr):
    """Return the query of each line [m] within its row and among all, and which lines exist."""
    line = tl.arange(0, m)
    query = begin + line // shared
    start = tl.load(query_start_at + row)
    count = tl.load(query_start_at + row + 1) - start
    return query, start + query, (line < tile * shared) & (query < count)


@triton.jit
def _walk(
    largest, total, sums, q, turned,
    keys_at, values_at, key_scales_at, value_scales_at, table_at,
    kv_head, place, from_key, to_key, first, last, factor, cap, window,
    block_size: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, masked: tl.constexpr, n: tl.constexpr,
    d: tl.constexpr, rotated: tl.constexpr, r: tl.constexpr,
):  # fmt: skip
    """Accumulate the tiles of keys in [from_key, to_key); keys outside [first, last) are not read."""
    known = tl.minimum(tl.maximum(from_key + tl.arange(0, n), first), last - 1)
    block = tl.load(table_at + known // block_size)
    for base in range(from_key, to_key, n):
        key = base + tl.arange(0, n)
        known = tl.minimum(key, last - 1) if masked else key
        if masked and window is not None:
            known = tl.maximum(known, first)
        keys, values, key_scale, value_scale = load_slots(
            keys_at, values_at, key_scales_at, value_scales_at, block, known, kv_head,
            block_size, kv_heads, width, d, rotated, r,
        )  # fmt: skip
        # One tile ahead, so that loads of keys do not wait for it.
        block = tl.load(table_at + tl.minimum(key + n, last - 1) // block_size)
        seen = key[None, :] <= place[:, None]
        if window is not None:
            seen = seen & (place[:, None] - key[None, :] < window)
        largest, total, sums = attend_tile(
            largest, total, sums, q, turned, keys, values, key_scale, value_scale, seen, factor, cap,
            masked, key_scales_at is not None, rotated,
        )  # fmt: skip
    return largest, total, sums


@kernel(
    do_not_specialize=["table_stride", "rows", "least", "share", "most", "window"],
    do_not_specialize_on_alignment=["query_start_at", "context_at", "tables_at"],
)
def _prefill(
    q_at, keys_at, values_at, key_scales_at, value_scales_at, output_at, sinks_at, sums_at, counters_at,
    query_start_at, context_at, tables_at, table_stride,
    rows, least, share, most, factor, cap, window,
    block_size: tl.constexpr, kv_heads: tl.constexpr, shared: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
    m: tl.constexpr, n: tl.constexpr, d: tl.constexpr, rotated: tl.constexpr, r: tl.constexpr,
):  # fmt: skip
    # The tiles with the most keys start first, so that the last programs are short.
    kv_head = tl.program_id(0)
    place_of_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.num_programs(2) - 1 - tl.program_id(2)
    row = _row_of(place_of_tile, query_start_at, rows, tile)
    start = tl.load(query_start_at + row)
    count = tl.load(query_start_at + row + 1) - start
    begin = (place_of_tile - start // tile - row) * tile
    context = tl.load(context_at + row)
    nearest = context - count + begin  # position of the first query
    last = tl.minimum(context, nearest + tile)
    first = tl.maximum(0, nearest - window + 1) if window is not None else 0
    first_share = first // share
    programs = (last - 1) // share - first_share + 1
    if (begin < count) & (count >= least) & (split < programs):
        query, token, live = _prompt_lines(query_start_at, row, begin, tile, shared, m)
        place = context - count + query
        line = tl.arange(0, m)
        column = tl.arange(0, d)
        q_line = (token * (kv_heads * shared) + kv_head * shared + line % shared).to(tl.int64)
        q, turned = _load_queries(q_at, q_line, live, width, d, rotated, r)

        whole = (nearest + 1) // n * n  # up to here all queries see all keys, except for the window
        # From here on every key is in the window of every query.
        open_key = tl.cdiv(tl.maximum(0, last - window), n) * n if window is not None else 0
        table_at = tables_at + row.to(tl.int64) * table_stride
        first_span = _span_of(first)
        last_span = _span_of(last - 1)
        unit = 0
        if programs > 1:
            unit = _divided_before(row, query_start_at, context_at, least, share, window, tile) + begin // tile
            unit = unit * kv_heads + kv_head
            sums_at += unit.to(tl.int64) * most * (m * (d + 2))
        # A program sums the spans that begin in its share of the keys.
        from_span = first_span
        if split > 0:
            from_span = _span_of((first_share + split) * share - 1) + 1
        to_span = tl.minimum(_span_of((first_share + split + 1) * share - 1), last_span) + 1
        all_largest = tl.full((m,), -float("inf"), tl.float32)
        all_total = tl.zeros((m,), tl.float32)
        all_sums = tl.zeros((m, d), tl.float32)
        for span in range(from_span, to_span):
            largest = tl.full((m,), -float("inf"), tl.float32)
            total = tl.zeros((m,), tl.float32)
            sums = tl.zeros((m, d), tl.float32)
            from_key = tl.maximum(_span_start(span), first // n * n)
            to_key = tl.minimum(_span_start(span + 1), last)
            if window is not None:
                until = tl.maximum(from_key, tl.minimum(open_key, tl.minimum(whole, to_key)))
                largest, total, sums = _walk(
                    largest, total, sums, q, turned, keys_at, values_at, key_scales_at, value_scales_at, table_at,
                    kv_head, place, from_key, until, first, last, factor, cap, window,
                    block_size, kv_heads, width, True, n, d, rotated, r,
                )  # fmt: skip
                from_key = until
            until = tl.maximum(from_key, tl.minimum(whole, to_key))
            largest, total, sums = _walk(
                largest, total, sums, q, turned, keys_at, values_at, key_scales_at, value_scales_at, table_at, kv_head,
                place, from_key, until, first, last, factor, cap, window,
                block_size, kv_heads, width, False, n, d, rotated, r,
            )  # fmt: skip
            largest, total, sums = _walk(
                largest, total, sums, q, turned, keys_at, values_at, key_scales_at, value_scales_at, table_at, kv_head,
                place, until, to_key, first, last, factor, cap, window,
                block_size, kv_heads, width, True, n, d, rotated, r,
            )  # fmt: skip
            if programs > 1:
                at = sums_at + (span - first_span) * (m * (d + 2))
                tl.store(at + line[:, None] * d + column[None, :], sums)
                tl.store(at + m * d + line, largest)
                tl.store(at + m * (d + 1) + line, total)
            all_largest, all_total, all_sums = fold(all_largest, all_total, all_sums, largest, total, sums)
        if programs == 1:
            _write_prompt(
                output_at, sinks_at, query_start_at, row, begin, kv_head, all_largest, all_total, all_sums,
                kv_heads, shared, width, tile, m, d,
            )  # fmt: skip
        elif is_last(counters_at, unit, programs):
            all_largest = tl.full((m,), -float("inf"), tl.float32)
            all_total = tl.zeros((m,), tl.float32)
            all_sums = tl.zeros((m, d), tl.float32)
            for span in range(first_span, last_span + 1):
                at = sums_at + (span - first_span) * (m * (d + 2))
                sums = tl.load(at + line[:, None] * d + column[None, :])
                largest = tl.load(at + m * d + line)
                total = tl.load(at + m * (d + 1) + line)
                all_largest, all_total, all_sums = fold(all_largest, all_total, all_sums, largest, total, sums)
            _write_prompt(
                output_at, sinks_at, query_start_at, row, begin, kv_head, all_largest, all_total, all_sums,
                kv_heads, shared, width, tile, m, d,
            )  # fmt: skip


@triton.jit
def _write_prompt(
    output_at, sinks_at, query_start_at, row, begin, kv_head, largest, total, sums,
    kv_heads: tl.constexpr, shared: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, m: tl.constexpr,
    d: tl.constexpr,
):  # fmt: skip
    """Write the result of a tile. The lines are computed again: they would take registers during the sums."""
    _, token, live = _prompt_lines(query_start_at, row, begin, tile, shared, m)
    column = tl.arange(0, d)
    head = kv_head * shared + tl.arange(0, m) % shared
    line = (token * (kv_heads * shared) + head).to(tl.int64) * width
    result = averaged(largest, total, sums, sinks_at, head)
    mask = live[:, None] & (column < width)[None, :]
    tl.store(output_at + line[:, None] + column[None, :], result.to(output_at.dtype.element_ty), mask=mask)


class PagedAttention:
    """Attention on one device; one launch for decodes with or without drafts, and two with prompts."""

    def __init__(self, device: torch.device, multiprocessors: int, shared_memory: int) -> None:
        """Allocate memory for sums of chunks; `shared_memory` is the limit of one program in bytes."""
        self._programs, self._shared_memory = _PROGRAMS * multiprocessors, shared_memory
        self._sums = torch.empty(self._programs * _SUMS_BYTES // 4, dtype=torch.float32, device=device)
        self._counters = torch.zeros(self._programs * MOST_DRAFTED, dtype=torch.int32, device=device)
        """0 between launches."""
        self._prompt_counters = torch.zeros(_PROMPT_PROGRAMS * multiprocessors, dtype=torch.int32, device=device)
        """One per divided tile and KV head; 0 between launches."""
        self._rows: Array | None = None
        """`query_start` of the last step, which its groups of layers share."""
        self._divisions: dict[tuple[Any, ...], Division] = {}
        """Of that step: its layers have few kinds."""

    def __call__(self, q: Array, layer: CudaLayer, heads: Heads, step: StepInput) -> Array:
        """Attend with q [T, nh, d] over each row's blocks; returns [T, nh * d], or [T, nh * latent] of latent heads.

        Does not synchronize.
        """
        q, width, rotated = q.contiguous(), heads.latent or heads.head_dim, 0
        if heads.latent:
            rotated = heads.head_dim - width
            most = next(count for count in range(_LINES, 0, -1) if heads.num_heads % count == 0)
            heads = replace(heads, num_kv_heads=heads.num_heads // most)
        output = q.new_empty(*q.shape[:2], width)
        shared, item = heads.num_heads // heads.num_kv_heads, layer.keys.element_size()
        sizes = HeadSizes(shared, width, item, q.element_size(), heads.window is not None, rotated)
        arrays = q, *layer.arrays, output, heads.sinks
        rows = step.query_start, step.context_len, step.block_tables, step.block_tables.stride(0)
        count, prompts = len(step.context_len), step.max_query > MOST_DRAFTED
        if not prompts or count > 1:
            tile = decode_tile(sizes, self._shared_memory)
            tiles = cdiv(min(step.max_query, MOST_DRAFTED), tile.queries)
            constants, few = _constants(layer, heads, tile), next_power_of_2(shared)
            folded = max(1, min(_MOST_FOLDED, _FOLDED_ELEMENTS // (few * constants["d"])))
            constants |= {"few": few, "folded": folded, "scanned": _SCANNED}
            programs = heads.num_kv_heads * tiles * self._shares(heads, count, step.max_context)
            capacity = len(self._sums) // (programs * (constants["d"] + 4))  # lines of sums
            given = *arrays, self._sums, self._counters, *rows, count, tiles, MOST_DRAFTED, capacity
            _decode[(programs,)](*given, *_scaling(heads), **constants)
        if prompts:
            tile = prefill_tile(sizes, self._shared_memory)
            if step.query_start is not self._rows:
                self._rows, self._divisions = step.query_start, {}
            key = heads.num_kv_heads, heads.window, tile
            if key not in self._divisions:
                self._divisions[key] = self.division(step.host, heads, tile)
            division = self._divisions[key]
            # A row of n tokens begins at tile query_start // tile + row, so tiles of two rows never meet, and their
            # number does not depend on the lengths. Unused tiles return at once.
            grid = heads.num_kv_heads, len(q) // tile.queries + count, division.programs
            given = *arrays, self._sums, self._prompt_counters, *rows, count, MOST_DRAFTED + 1
            scaling, constants = _scaling(heads), _constants(layer, heads, tile)
            _prefill[grid](*given, division.share, division.spans, *scaling, **constants)
        return output.flatten(1)

    def _shares(self, heads: Heads, rows: int, max_context: int) -> int:
        """Return the number of parts of the work of a KV head: as many as fill the device or can have work."""
        visible = max_context if heads.window is None else min(max_context, heads.window + MOST_DRAFTED + LARGE_CHUNK)
        return max(1, min(self._programs // heads.num_kv_heads, rows * cdiv(visible, CHUNK)))

    def division(self, host: HostStep | None, heads: Heads, tile: Tile) -> Division:
        """Return how keys of prompts are divided: not if their lengths are unknown or their sums would not fit."""
        if host is None:
            return _UNDIVIDED
        counts = np.diff(host.query_start)
        prompts = counts > MOST_DRAFTED
        counts, ends = counts[prompts].astype(np.int64), host.context_len[prompts]
        firsts = np.maximum(0, ends - counts - heads.window + 1) if heads.window is not None else ends * 0
        units = -(-counts // tile.queries) * heads.num_kv_heads
        # A query sees half of the new keys on average.
        work = int((units * (ends - firsts - counts // 2)).sum())
        share = SPAN * max(1, math.ceil(work / (SPAN * len(self._prompt_counters))))
        programs = (ends - 1) // share - firsts // share + 1
        divided = programs > 1
        if not divided.any():
            return _UNDIVIDED
        ranges = zip(firsts[divided], ends[divided], strict=True)
        spans = max(span_of(end - 1) - span_of(first) + 1 for first, end in ranges)
        total = int(units[divided].sum())
        elements = total * spans * tile.lines * (_padded(heads.latent or heads.head_dim) + 2)
        if total > len(self._prompt_counters) or elements > len(self._sums):
            return _UNDIVIDED
        return Division(share, int(programs.max()), int(spans))
