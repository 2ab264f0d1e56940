"""Paged attention in Triton: decode, chunked prefill and both in one step.

One program computes one tile of queries of one row for one KV head; the query heads that share the KV head lie in the
tile side by side. It walks over the keys in tiles and keeps a running softmax in float32 (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", NeurIPS 2022). A row is always walked
in the same order, whatever else is in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Array, Heads, StepInput

from fd_gpu_cuda.kv_cache import CudaLayer

__all__ = ["paged_attention"]

_TILE_ROWS = 16
"""Smallest tile that tensor cores multiply."""
_MOST_ROWS = 64
_MOST_KEYS = 64
"""Keys of a tile; half as many in float32, whose tiles of 128 elements would not fit where an SM has 100 KiB."""


def paged_attention(q: Array, layer: CudaLayer, heads: Heads, step: StepInput) -> Array:
    """Attend with q [T, nh, d] over each row's blocks; returns [T, nh * d]. Waits for nothing."""
    tokens, num_heads, width = q.shape
    shared = num_heads // heads.num_kv_heads
    tile = _tile_queries(shared, step.max_query)
    rows = len(step.context_len)
    # A row of n tokens begins at tile query_start // tile + row, so tiles of two rows never meet, and the grid is
    # known without a look at the lengths. Tiles that no row needs return at once.
    tiles = rows if step.max_query == 1 else tokens // tile + rows
    q = q.contiguous()
    output = torch.empty_like(q)
    _attend[(tiles, heads.num_kv_heads)](
        q,
        layer.keys,
        layer.values,
        output,
        step.query_start,
        step.context_len,
        step.block_tables,
        step.block_tables.stride(0),
        layer.keys.stride(0),
        rows,
        heads.scale,
        heads.softcap or 0.0,
        heads.window or 0,
        block_size=layer.block_size,
        heads=num_heads,
        shared=shared,
        width=width,
        single=step.max_query == 1,
        capped=heads.softcap is not None,
        tile=tile,
        m=max(_TILE_ROWS, triton.next_power_of_2(tile * shared)),
        n=_MOST_KEYS if q.element_size() == 2 else _MOST_KEYS // 2,
        d=max(_TILE_ROWS, triton.next_power_of_2(width)),
    )
    return output.flatten(1)


def _tile_queries(shared: int, max_query: int) -> int:
    """Return how many tokens a tile holds: all that fit in its rows, a decode needs one."""
    if max_query == 1:
        return 1
    return max(1, (_MOST_ROWS if max_query > _TILE_ROWS else _TILE_ROWS) // shared)


@triton.jit
def _attend(
    q_at,
    keys_at,
    values_at,
    output_at,
    query_start_at,
    context_at,
    tables_at,
    table_stride,
    slot_stride,
    rows,
    scale,
    softcap,
    window,
    block_size: tl.constexpr,
    heads: tl.constexpr,
    shared: tl.constexpr,
    width: tl.constexpr,
    single: tl.constexpr,
    capped: tl.constexpr,
    tile: tl.constexpr,
    m: tl.constexpr,
    n: tl.constexpr,
    d: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = program
    first_tile = program
    if not single:
        # The last row that begins at this tile or before it.
        low = 0
        high = rows
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(query_start_at + middle) // tile + middle <= program:
                low = middle
            else:
                high = middle
        row = low
        first_tile = tl.load(query_start_at + row) // tile + row
    start = tl.load(query_start_at + row)
    count = tl.load(query_start_at + row + 1) - start
    begin = (program - first_tile) * tile
    if begin < count:
        context = tl.load(context_at + row)
        line = tl.arange(0, m)
        query = begin + line // shared
        live = (line < tile * shared) & (query < count)
        place = context - count + query
        column = tl.arange(0, d)
        inside = column < width
        q_line = ((start + query) * heads + kv_head * shared + line % shared).to(tl.int64) * width
        q_mask = live[:, None] & inside[None, :]
        q = tl.load(q_at + q_line[:, None] + column[None, :], mask=q_mask, other=0.0)

        last = tl.minimum(context, context - count + begin + tile)
        first = 0
        if window > 0:
            first = tl.maximum(0, context - count + begin - window + 1) // n * n
        largest = tl.full((m,), -float("inf"), tl.float32)
        total = tl.zeros((m,), tl.float32)
        sums = tl.zeros((m, d), tl.float32)
        table = tables_at + row.to(tl.int64) * table_stride
        for base in range(first, last, n):
            key = base + tl.arange(0, n)
            known = key < last
            block = tl.load(table + key // block_size, mask=known, other=0)
            slot = block.to(tl.int64) * block_size + key % block_size
            at = slot * slot_stride + kv_head * width
            kv_mask = known[:, None] & inside[None, :]
            keys = tl.load(keys_at + at[:, None] + column[None, :], mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            if capped:
                # tanh(x) = 2 sigmoid(2 x) - 1
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            seen = known[None, :] & (key[None, :] <= place[:, None])
            if window > 0:
                seen = seen & (place[:, None] - key[None, :] < window)
            scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(largest, tl.max(scores, 1))
            # A line that has seen no key yet has -inf as its largest score: subtract 0 instead.
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            shrink = tl.exp(largest - shift)
            weights = tl.exp(scores - shift[:, None])
            values = tl.load(values_at + at[:, None] + column[None, :], mask=kv_mask, other=0.0)
            total = total * shrink + tl.sum(weights, 1)
            sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            largest = higher
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(output_at + q_line[:, None] + column[None, :], result.to(output_at.dtype.element_ty), mask=q_mask)
