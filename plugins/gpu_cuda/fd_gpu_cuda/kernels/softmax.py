"""Softmax over keys that come tile by tile, and sums of chunks of keys: what the attention kernels share.

Exponents are of base 2. Where two products are added, which of them is rounded is written out (`fma`): a compiler that
chose would not choose alike in two kernels, and a row would have other bits where it is computed in pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""What turns a score into an exponent of base 2."""


@triton.jit
def load_tile(
    keys_at,
    values_at,
    key_scales_at,
    value_scales_at,
    table_at,
    key,
    kv_head,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    quantized: tl.constexpr,
    d: tl.constexpr,
):
    """Load keys and values [n, d] of one KV head at positions [n], which must all be known, and their scales [n]."""
    block = tl.load(table_at + key // block_size).to(tl.int64)
    place = (block * block_size + key % block_size) * kv_heads + kv_head
    column = tl.arange(0, d)
    at = place[:, None] * width + column[None, :]
    if width == d:
        keys = tl.load(keys_at + at)
        values = tl.load(values_at + at)
    else:
        inside = (column < width)[None, :]
        keys = tl.load(keys_at + at, mask=inside, other=0.0)
        values = tl.load(values_at + at, mask=inside, other=0.0)
    key_scale = tl.load(key_scales_at + place) if quantized else 1.0
    value_scale = tl.load(value_scales_at + place) if quantized else 1.0
    return keys, values, key_scale, value_scale


@triton.jit
def attend_tile(
    largest,
    total,
    sums,
    q,
    keys,
    values,
    key_scale,
    value_scale,
    seen,
    factor,
    cap,
    masked: tl.constexpr,
    capped: tl.constexpr,
    quantized: tl.constexpr,
):
    """Take one tile into a running softmax: largest and total [m], sums [m, d].

    q: [m, d]; keys and values: [n, d]; seen: [m, n], read if `masked`. Scores are products of q and keys times
    `factor`, an exponent of base 2. Or, capped, tanh(product * factor) times `cap`, which has the base in it.
    """
    scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
    if quantized:
        scores *= key_scale[None, :]
    if capped:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = 2.0 * tl.sigmoid(scores * (2.0 * factor)) - 1.0
        factor = cap
    exponents = scores * factor
    if masked:
        exponents = tl.where(seen, exponents, -float("inf"))
    higher = tl.maximum(largest, tl.max(exponents, 1))
    # A line that has seen no key yet has -inf as its largest score: subtract 0 instead.
    shift = tl.where(higher == -float("inf"), 0.0, higher) if masked else higher
    weights = tl.exp2(exponents - shift[:, None])
    shrink = tl.exp2(largest - shift)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    if quantized:
        if q.dtype == tl.float16:
            # A weight times a scale may be less than float16 can hold.
            values = (values.to(tl.float32) * value_scale[:, None]).to(tl.float16)
        else:
            weights *= value_scale[None, :]
            values = values.to(q.dtype)
    sums = tl.dot(weights.to(q.dtype), values, sums * shrink[:, None], input_precision="ieee")
    return higher, total, sums


@triton.jit
def fold(largest, total, sums, more_largest, more_total, more_sums):
    """Join two softmaxes over different keys: largest and total [m], sums [m, d]. One without keys changes nothing."""
    higher = tl.maximum(largest, more_largest)
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    own = tl.exp2(largest - shift)
    more = tl.exp2(more_largest - shift)
    total = tl.fma(more_total, more, total * own)
    sums = tl.fma(more_sums, tl.broadcast_to(more[:, None], sums.shape), sums * own[:, None])
    return higher, total, sums
