"""Fused head norms, rope and KV write, between the q/k/v projection and attention.

One program computes some heads of one kind, queries, keys or values, of one token. It holds them in registers as two
tiles, the first and the second elements of the rotated pairs, so no element moves between threads. All is computed in
float32 and rounded at the same points as in the separate operations: after a norm, and after the rotation. `write_kv`
is the last part alone: keys and values in the pack's dtype, or in 8 bits: with a scale, or in FP8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Array, Heads, StepInput

from fd_gpu_cuda.kernels.entry import cdiv, kernel, next_power_of_2
from fd_gpu_cuda.kernels.norms import weight_and_eps
from fd_gpu_cuda.kv_cache import CudaLayer


def write_kv(k: Array, v: Array, layer: CudaLayer, kv_slots: Array) -> None:
    """Write k and v [T, nkv, d], of any widths, token and head strides, to slots int32[T]; one launch."""
    (tokens, num_kv_heads, width), value_width = k.shape, v.shape[2]
    if not tokens:
        return
    strides = k.stride(0), v.stride(0), k.stride(1), v.stride(1)
    m, d = next_power_of_2(num_kv_heads), next_power_of_2(max(width, value_width))
    sizes = {"kv_heads": num_kv_heads, "width": width, "value_width": value_width, "m": m, "d": d}
    _write_kv[(tokens, 2)](k, v, *layer.arrays, kv_slots, *strides, **sizes)


@kernel(do_not_specialize_on_alignment=["slots_at"])
def _write_kv(
    k_at, v_at, keys_at, values_at, key_scales_at, value_scales_at, slots_at,
    k_stride, v_stride, k_head_stride, v_head_stride,
    kv_heads: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, m: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + token).to(tl.int64)
    head = tl.arange(0, m)
    column = tl.arange(0, d)
    live = head < kv_heads
    if tl.program_id(1) == 0:
        inside = live[:, None] & (column < width)[None, :]
        x = tl.load(k_at + token * k_stride + head[:, None] * k_head_stride + column[None, :], mask=inside, other=0.0)
        store_kv(x.to(tl.float32), keys_at, key_scales_at, slot, head, live, inside, kv_heads, width, d)
    else:
        inside = live[:, None] & (column < value_width)[None, :]
        x = tl.load(v_at + token * v_stride + head[:, None] * v_head_stride + column[None, :], mask=inside, other=0.0)
        store_kv(x.to(tl.float32), values_at, value_scales_at, slot, head, live, inside, kv_heads, value_width, d)


@triton.jit
def store_kv(
    x, cache_at, scales_at, slot, head, live, inside,
    kv_heads: tl.constexpr, width: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """Store one token's keys or values of some KV heads, as specified by `Ops.write_kv`.

    x: float32 [m, d], 0 where it is not inside. cache_at and scales_at: a layer's keys or its values, and their scales,
    as `CudaLayer` has them. slot: int64. head: int32 [m], which of `kv_heads`.
    live: [m], whether the head is written; inside: [m, d], whether the element is one of `width` of a live head.
    """
    place = slot * kv_heads + head
    column = tl.arange(0, d)
    if scales_at is not None:
        scale = kv_scale(tl.max(tl.abs(x), 1), tl.sum(x * 0.0, 1))
        x = kv_steps(x, scale)
        tl.store(scales_at + place, scale, mask=live)
    elif cache_at.dtype.element_ty == tl.float8e4nv:
        x = fp8_of(x)
    tl.store(cache_at + place[:, None] * width + column[None, :], x.to(cache_at.dtype.element_ty), mask=inside)


@triton.jit
def kv_scale(largest, strange):
    """Return the scales of heads float32[m] by their largest magnitudes; `strange` is NaN if an element is not finite.

    A maximum ignores NaN; the scale must not.
    """
    return tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)) + strange


@triton.jit
def kv_steps(x, scale):
    """Quantize elements float32[m, n] to integer steps of the scales of their heads [m]."""
    steps = tl.div_rn(x, tl.broadcast_to(tl.where(scale == 0.0, 1.0, scale)[:, None], x.shape))
    # Round to nearest even: adding 1.5 * 2^23 leaves no fraction bits.
    return tl.minimum(tl.maximum((steps + 12582912.0) - 12582912.0, -127.0), 127.0)


@triton.jit
def fp8_of(x):
    """Convert float32 to float8_e4m3fn, ties to even, at most the largest; NaN unless finite.

    By its bits, because conversions differ between devices and the interpreter.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    code = size.to(tl.int32, bitcast=True)
    # Three bits of mantissa of 23 remain; exponents begin at -6 instead of -126.
    bits = ((code + 0x7FFFF + ((code >> 20) & 1)) >> 20) - 960
    # Below 2^-6 these are multiples of 2^-9: adding 2^-9 of 1.5 * 2^23 leaves that many bits.
    steps = (size + 24576.0).to(tl.int32, bitcast=True) - 0x46C00000
    bits = tl.where(size < 0.015625, steps, bits)
    bits = tl.where(x * 0.0 == 0.0, bits, 127)
    bits |= (x.to(tl.int32, bitcast=True) >> 24) & 128
    return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


_ELEMENTS = 1024
"""Elements of a program: eight of each tile per thread of its two warps, one 16-byte load in 16 bits."""
_WARPS = 2


def rotate_and_store(qkv: Array, layer: CudaLayer, heads: Heads, step: StepInput) -> Array:
    """Normalize and rotate queries and keys of qkv [T, (nh + 2 nkv) d], and write keys and values to their slots.

    Returns q [T, nh, d]; does not synchronize.
    """
    rope, (q_weight, q_eps), (k_weight, k_eps) = heads.rope, weight_and_eps(heads.q_norm), weight_and_eps(heads.k_norm)
    q = torch.empty((len(qkv), heads.num_heads, heads.head_dim), dtype=qkv.dtype, device=qkv.device)
    d = next_power_of_2(heads.head_dim)
    lines = min(max(_ELEMENTS // d, 1), next_power_of_2(heads.num_heads))
    groups = cdiv(heads.num_heads, lines) + 2 * cdiv(heads.num_kv_heads, lines)
    if len(qkv):
        arrays = qkv.contiguous(), q, *layer.arrays, step.kv_slots, step.positions, rope.cos, rope.sin
        norms = q_weight, k_weight, q_eps, k_eps
        sizes = {"heads": heads.num_heads, "kv_heads": heads.num_kv_heads, "width": heads.head_dim}
        turning = {"half": rope.cos.shape[1], "interleaved": rope.interleaved}
        _rotate_and_store[(len(qkv), groups)](
            *arrays, *norms, **sizes, **turning, lines=lines, tile=max(d // 2, 1), num_warps=_WARPS
        )
    return q


@triton.jit
def _columns(half: tl.constexpr, interleaved: tl.constexpr, tile: tl.constexpr):
    """Return the columns of the first and the second elements of pairs in a head, int32[tile] each.

    Rope rotates the first `half` pairs. The others are unrotated columns, and columns beyond the head.
    """
    pair = tl.arange(0, tile)
    if interleaved:
        first = 2 * pair
        second = first + 1
    else:
        first = tl.where(pair < half, pair, pair + half)
        second = tl.where(pair < half, pair + half, pair + tile)
    return first, second


@triton.jit
def _load_pairs(heads_at, known, first, second, width: tl.constexpr):
    """Return the firsts and the seconds of the heads at heads_at [lines], float32[lines, tile] each, 0 beyond them."""
    a_mask = known[:, None] & (first < width)[None, :]
    b_mask = known[:, None] & (second < width)[None, :]
    a = tl.load(heads_at[:, None] + first[None, :], mask=a_mask, other=0.0).to(tl.float32)
    b = tl.load(heads_at[:, None] + second[None, :], mask=b_mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(heads_at, known, first, second, a, b, width: tl.constexpr):
    """Write the result of `_load_pairs` to other heads, rounded to their type."""
    element = heads_at.dtype.element_ty
    a_mask = known[:, None] & (first < width)[None, :]
    b_mask = known[:, None] & (second < width)[None, :]
    tl.store(heads_at[:, None] + first[None, :], a.to(element), mask=a_mask)
    tl.store(heads_at[:, None] + second[None, :], b.to(element), mask=b_mask)


@triton.jit
def _keep_pairs(cache_at, scales_at, place, known, first, second, a, b, width: tl.constexpr):
    """Write keys or values to their slots [lines] in the cache."""
    if scales_at is not None:
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        scale = kv_scale(largest, tl.sum(a * 0.0, 1) + tl.sum(b * 0.0, 1))
        a = kv_steps(a, scale)
        b = kv_steps(b, scale)
        tl.store(scales_at + place, scale, mask=known)
    elif cache_at.dtype.element_ty == tl.float8e4nv:
        a = fp8_of(a)
        b = fp8_of(b)
    _store_pairs(cache_at + place * width, known, first, second, a, b, width)


@triton.jit
def _normalize(a, b, first, second, weight_at, eps, width: tl.constexpr, element: tl.constexpr):
    """Return the norms of heads, rounded to `element`."""
    inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / width + eps)[:, None]
    a_weight = tl.load(weight_at + first, mask=first < width, other=0.0)[None, :]
    b_weight = tl.load(weight_at + second, mask=second < width, other=0.0)[None, :]
    return (a * inverse * a_weight).to(element).to(tl.float32), (b * inverse * b_weight).to(element).to(tl.float32)


@triton.jit
def _turn(a, b, cos_at, sin_at, half: tl.constexpr, tile: tl.constexpr):
    """Return heads rotated by the angles at cos_at and sin_at [half]."""
    pair = tl.arange(0, tile)
    cos = tl.load(cos_at + pair, mask=pair < half, other=1.0)[None, :]
    sin = tl.load(sin_at + pair, mask=pair < half, other=0.0)[None, :]
    return a * cos - b * sin, b * cos + a * sin


@kernel(do_not_specialize_on_alignment=["slots_at", "positions_at"])
def _rotate_and_store(
    qkv_at, q_at, keys_at, values_at, key_scales_at, value_scales_at, slots_at, positions_at,
    cos_at, sin_at, q_weight_at, k_weight_at, q_eps, k_eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, half: tl.constexpr, interleaved: tl.constexpr,
    lines: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (heads + lines - 1) // lines
    kv_groups: tl.constexpr = (kv_heads + lines - 1) // lines
    element = qkv_at.dtype.element_ty
    first, second = _columns(half, interleaved, tile)
    line = tl.arange(0, lines)
    qkv_at += token * ((heads + 2 * kv_heads) * width)
    angle = tl.load(positions_at + token).to(tl.int64) * half
    if group < q_groups:
        head = group * lines + line
        known = head < heads
        a, b = _load_pairs(qkv_at + head * width, known, first, second, width)
        if q_weight_at is not None:
            a, b = _normalize(a, b, first, second, q_weight_at, q_eps, width, element)
        a, b = _turn(a, b, cos_at + angle, sin_at + angle, half, tile)
        _store_pairs(q_at + token * (heads * width) + head * width, known, first, second, a, b, width)
    else:
        place = tl.load(slots_at + token).to(tl.int64) * kv_heads
        if group < q_groups + kv_groups:
            head = (group - q_groups) * lines + line
            known = head < kv_heads
            a, b = _load_pairs(qkv_at + (heads + head) * width, known, first, second, width)
            if k_weight_at is not None:
                a, b = _normalize(a, b, first, second, k_weight_at, k_eps, width, element)
            a, b = _turn(a, b, cos_at + angle, sin_at + angle, half, tile)
            a, b = a.to(element).to(tl.float32), b.to(element).to(tl.float32)
            _keep_pairs(keys_at, key_scales_at, place + head, known, first, second, a, b, width)
        else:
            head = (group - q_groups - kv_groups) * lines + line
            known = head < kv_heads
            a, b = _load_pairs(qkv_at + (heads + kv_heads + head) * width, known, first, second, width)
            _keep_pairs(values_at, value_scales_at, place + head, known, first, second, a, b, width)
