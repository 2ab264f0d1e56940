"""Attention of rows with many tokens, in Triton: prompts and chunks of prompts, beside decodes or not.

One program computes one tile of queries of one row for one KV head; the query heads that share the KV head lie in the
tile side by side. It walks over the keys in tiles and keeps a running softmax in float32 (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", NeurIPS 2022). Tiles of keys that all
queries see wholly need no mask. A row is always walked in the same order, whatever else is in the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fd_core.ops.contract import Array, Heads, StepInput

from fd_gpu_cuda.kernels.attention_tiles import Tile
from fd_gpu_cuda.kernels.entry import kernel
from fd_gpu_cuda.kernels.softmax import LOG2_E, attend_tile, load_tile
from fd_gpu_cuda.kv_cache import CudaLayer


def prefill_attention(
    q: Array, layer: CudaLayer, heads: Heads, step: StepInput, output: Array, tile: Tile, least: int
) -> None:
    """Attend with contiguous q [T, nh, d] of rows that have at least `least` tokens, into `output` of that shape."""
    rows = len(step.context_len)
    # A row of n tokens begins at tile query_start // tile + row, so tiles of two rows never meet, and the grid is
    # known without a look at the lengths. Tiles that no row needs return at once.
    tiles = len(q) // tile.queries + rows
    _prefill[(tiles, heads.num_kv_heads)](
        q,
        layer.keys,
        layer.values,
        layer.key_scales,
        layer.value_scales,
        output,
        step.query_start,
        step.context_len,
        step.block_tables,
        step.block_tables.stride(0),
        rows,
        least,
        heads.scale * (LOG2_E if heads.softcap is None else 1 / heads.softcap),
        (heads.softcap or 0.0) * LOG2_E,
        heads.window or 0,
        block_size=layer.block_size,
        kv_heads=heads.num_kv_heads,
        shared=heads.num_heads // heads.num_kv_heads,
        width=heads.head_dim,
        capped=heads.softcap is not None,
        windowed=heads.window is not None,
        quantized=layer.quantized,
        tile=tile.queries,
        m=tile.lines,
        n=tile.keys,
        d=max(16, triton.next_power_of_2(heads.head_dim)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _row_of(program, query_start_at, rows, tile: tl.constexpr):
    """Return the last row that begins at this tile or before it."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_at + middle) // tile + middle <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _walk(
    largest,
    total,
    sums,
    q,
    keys_at,
    values_at,
    key_scales_at,
    value_scales_at,
    table_at,
    kv_head,
    place,
    from_key,
    to_key,
    first,
    last,
    factor,
    cap,
    window,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
    windowed: tl.constexpr,
    quantized: tl.constexpr,
    masked: tl.constexpr,
    n: tl.constexpr,
    d: tl.constexpr,
):
    """Take the tiles of keys in [from_key, to_key); keys outside [first, last) are not read."""
    for base in range(from_key, to_key, n):
        key = base + tl.arange(0, n)
        known = tl.minimum(tl.maximum(key, first), last - 1) if masked else key
        keys, values, key_scale, value_scale = load_tile(
            keys_at, values_at, key_scales_at, value_scales_at, table_at, known, kv_head,
            block_size, kv_heads, width, quantized, d,
        )  # fmt: skip
        seen = key[None, :] <= place[:, None]
        if windowed:
            seen = seen & (place[:, None] - key[None, :] < window)
        largest, total, sums = attend_tile(
            largest, total, sums, q, keys, values, key_scale, value_scale, seen, factor, cap,
            masked, capped, quantized,
        )  # fmt: skip
    return largest, total, sums


@kernel(
    do_not_specialize=["table_stride", "rows", "least", "window"],
    do_not_specialize_on_alignment=["query_start_at", "context_at", "tables_at"],
)
def _prefill(
    q_at,
    keys_at,
    values_at,
    key_scales_at,
    value_scales_at,
    output_at,
    query_start_at,
    context_at,
    tables_at,
    table_stride,
    rows,
    least,
    factor,
    cap,
    window,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    shared: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
    windowed: tl.constexpr,
    quantized: tl.constexpr,
    tile: tl.constexpr,
    m: tl.constexpr,
    n: tl.constexpr,
    d: tl.constexpr,
):
    kv_head = tl.program_id(1)
    row = _row_of(tl.program_id(0), query_start_at, rows, tile)
    start = tl.load(query_start_at + row)
    count = tl.load(query_start_at + row + 1) - start
    begin = (tl.program_id(0) - start // tile - row) * tile
    if (begin < count) & (count >= least):
        context = tl.load(context_at + row)
        line = tl.arange(0, m)
        query = begin + line // shared
        live = (line < tile * shared) & (query < count)
        place = context - count + query
        column = tl.arange(0, d)
        inside = column < width
        head = kv_head * shared + line % shared
        q_line = ((start + query) * (kv_heads * shared) + head).to(tl.int64) * width
        q_mask = live[:, None] & inside[None, :]
        q = tl.load(q_at + q_line[:, None] + column[None, :], mask=q_mask, other=0.0)

        nearest = context - count + begin  # the place of the first query
        last = tl.minimum(context, nearest + tile)
        first = tl.maximum(0, nearest - window + 1) if windowed else 0
        whole = (nearest + 1) // n * n  # up to here all queries see all keys, but for the window
        largest = tl.full((m,), -float("inf"), tl.float32)
        total = tl.zeros((m,), tl.float32)
        sums = tl.zeros((m, d), tl.float32)
        table_at = tables_at + row.to(tl.int64) * table_stride
        from_key = first // n * n
        if windowed:
            # From here on every key is in the window of every query.
            open_key = tl.minimum(tl.cdiv(tl.maximum(0, last - window), n) * n, whole)
            open_key = tl.maximum(open_key, from_key)
            largest, total, sums = _walk(
                largest, total, sums, q, keys_at, values_at, key_scales_at, value_scales_at, table_at, kv_head, place,
                from_key, open_key, first, last, factor, cap, window,
                block_size, kv_heads, width, capped, windowed, quantized, True, n, d,
            )  # fmt: skip
            from_key = open_key
        largest, total, sums = _walk(
            largest, total, sums, q, keys_at, values_at, key_scales_at, value_scales_at, table_at, kv_head, place,
            from_key, whole, first, last, factor, cap, window,
            block_size, kv_heads, width, capped, windowed, quantized, False, n, d,
        )  # fmt: skip
        largest, total, sums = _walk(
            largest, total, sums, q, keys_at, values_at, key_scales_at, value_scales_at, table_at, kv_head, place,
            tl.maximum(from_key, whole), last, first, last, factor, cap, window,
            block_size, kv_heads, width, capped, windowed, quantized, True, n, d,
        )  # fmt: skip
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(output_at + q_line[:, None] + column[None, :], result.to(output_at.dtype.element_ty), mask=q_mask)
