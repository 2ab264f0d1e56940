"""Keys and values on their way into the cache, in Triton: as they are, or in 8 bits with a scale."""

from __future__ import annotations

import triton
import triton.language as tl
from fd_core.ops.contract import Array

from fd_gpu_cuda.kernels.entry import kernel
from fd_gpu_cuda.kv_cache import CudaLayer


def write_kv(k: Array, v: Array, layer: CudaLayer, kv_slots: Array) -> None:
    """Write k and v [T, nkv, d], whose tokens and heads may lie apart, to slots int32[T]; one launch."""
    tokens, num_kv_heads, width = k.shape
    if not tokens:
        return
    _write_kv[(tokens, 2)](
        k,
        v,
        layer.keys,
        layer.values,
        layer.key_scales,
        layer.value_scales,
        kv_slots,
        k.stride(0),
        v.stride(0),
        k.stride(1),
        v.stride(1),
        kv_heads=num_kv_heads,
        width=width,
        quantized=layer.quantized,
        m=triton.next_power_of_2(num_kv_heads),
        d=triton.next_power_of_2(width),
    )


@kernel(do_not_specialize_on_alignment=["slots_at"])
def _write_kv(
    k_at,
    v_at,
    keys_at,
    values_at,
    key_scales_at,
    value_scales_at,
    slots_at,
    k_stride,
    v_stride,
    k_head_stride,
    v_head_stride,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    quantized: tl.constexpr,
    m: tl.constexpr,
    d: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + token).to(tl.int64)
    head = tl.arange(0, m)
    column = tl.arange(0, d)
    live = head < kv_heads
    inside = live[:, None] & (column < width)[None, :]
    if tl.program_id(1) == 0:
        x = tl.load(k_at + token * k_stride + head[:, None] * k_head_stride + column[None, :], mask=inside, other=0.0)
        store_kv(x.to(tl.float32), keys_at, key_scales_at, slot, head, live, inside, kv_heads, width, quantized, d)
    else:
        x = tl.load(v_at + token * v_stride + head[:, None] * v_head_stride + column[None, :], mask=inside, other=0.0)
        store_kv(x.to(tl.float32), values_at, value_scales_at, slot, head, live, inside, kv_heads, width, quantized, d)


@triton.jit
def store_kv(
    x,
    cache_at,
    scales_at,
    slot,
    head,
    live,
    inside,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    quantized: tl.constexpr,
    d: tl.constexpr,
):
    """Keep what one token has for some KV heads, keys or values, as `Ops.write_kv` says.

    x: float32 [m, d], 0 where it is not inside. cache_at and scales_at: a layer's keys or its values, and their scales,
    as `CudaLayer` has them; scales_at is not read unless quantized. slot: int64. head: int32 [m], which of `kv_heads`.
    live: [m], whether the head is written; inside: [m, d], whether the element is one of `width` of a live head.
    """
    place = slot * kv_heads + head
    column = tl.arange(0, d)
    if quantized:
        scale = kv_scale(tl.max(tl.abs(x), 1), tl.sum(x * 0.0, 1))
        x = kv_steps(x, scale)
        tl.store(scales_at + place, scale, mask=live)
    tl.store(cache_at + place[:, None] * width + column[None, :], x.to(cache_at.dtype.element_ty), mask=inside)


@triton.jit
def kv_scale(largest, strange):
    """Return the scales of heads float32[m] by their largest magnitudes; strange is NaN where an element is not finite.

    A maximum ignores what is no number; the scale must not.
    """
    return tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)) + strange


@triton.jit
def kv_steps(x, scale):
    """Return elements float32[m, n] in whole steps of the scales of their heads [m]."""
    steps = tl.div_rn(x, tl.broadcast_to(tl.where(scale == 0.0, 1.0, scale)[:, None], x.shape))
    # To the nearest, to the even one if it is halfway: 1.5 * 2^23 leaves no bits of a fraction.
    return tl.minimum(tl.maximum((steps + 12582912.0) - 12582912.0, -127.0), 127.0)
