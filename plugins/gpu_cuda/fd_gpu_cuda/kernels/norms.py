"""RMS norms in Triton, with the sum before them in the same launch, gated activations, and sums of ranks.

One program computes one row of a norm in registers, with one read and one write. Sums are in float32, and results are
rounded at the same points as in the separate operations. `width` is a constant of the kernel, so that rows are aligned
for 16-byte loads if the width allows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Activation, Array, Norm

from fd_gpu_cuda.kernels.entry import cdiv, kernel, next_power_of_2

_TILE = 1024


def gate(gate_up: Array, activation: Activation) -> Array:
    """[T, 2 I] -> [T, I]: activation(gate) * up, where gate is the first half; does not synchronize."""
    tokens, inner = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, cdiv(inner, _TILE))
        _gate[grid](gate_up.contiguous(), out, inner=inner, activation=activation, tile=_TILE)
    return out


@kernel
def _gate(gate_up_at, out_at, inner: tl.constexpr, activation: tl.constexpr, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < inner
    element = gate_up_at.dtype.element_ty
    x = tl.load(gate_up_at + row * (2 * inner) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_at + row * (2 * inner) + inner + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at + row * inner + column, gated(x, up, activation, element), mask=inside)


@triton.jit
def activated(x, activation: tl.constexpr, element: tl.constexpr):
    """Return activation(x) of float32, rounded as the separate operation does before a product; NaN remains."""
    if activation == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif activation == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif activation == "quick_gelu":
        x = x / (1.0 + tl.exp(-1.702 * x))
    elif activation == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif activation == "relu2":
        x = tl.where(x < 0.0, 0.0, x * x)
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x.to(element)


@triton.jit
def gated(x, up, activation: tl.constexpr, element: tl.constexpr):
    """Return activation(x) * up of float32, rounded as the separate operations do."""
    if activation == "clamped_swiglu":
        x = tl.where(x > 7.0, 7.0, x)  # NaN remains
        up = (tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0).to(element).to(tl.float32)
        x = (x / (1.0 + tl.exp(-1.702 * x))).to(element)
    else:
        x = activated(x, activation, element)
    return (x.to(tl.float32) * up).to(element)


def add_ranks(parts: Array) -> Array:
    """[ranks, n] -> [n], in float32 in the order of ranks, rounded once; does not synchronize."""
    ranks, count = parts.shape
    out = torch.empty(count, dtype=parts.dtype, device=parts.device)
    if count:
        _add_ranks[(cdiv(count, _TILE),)](parts, out, count, ranks=ranks, tile=_TILE)
    return out


@kernel
def _add_ranks(parts_at, out_at, count, ranks: tl.constexpr, tile: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside, at = place < count, place
    total = tl.load(parts_at + at, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, ranks):
        at += count
        total += tl.load(parts_at + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at + place, total.to(out_at.dtype.element_ty), mask=inside)


def weight_and_eps(norm: Norm | None) -> tuple[Array | None, float]:
    """Return the kernel arguments of a norm; the weight is None without one."""
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)


_ELEMENTS_PER_THREAD = 8
_MOST_WARPS = 16


def add_norm(
    x: Array, norm: Norm | None, y: Array | None = None, post_norm: Norm | None = None, rows: Array | None = None
) -> Array:
    """Return the norm of x [T, H], or of x + y or x + post_norm(y), whose sum is written into x; does not synchronize.

    `rows` int32[R] selects rows, [R, H]; x is then unchanged. Without `norm` the sum is returned. Raises `ValueError`
    if x is not contiguous.
    """
    if not x.is_contiguous():
        raise ValueError("the rows of the residual must be contiguous")
    width = x.shape[1]
    count = len(x) if rows is None else len(rows)
    out = x if norm is None and rows is None else torch.empty((count, width), dtype=x.dtype, device=x.device)
    if count:
        d = next_power_of_2(width)
        (weight, eps), (post_weight, post_eps) = weight_and_eps(norm), weight_and_eps(post_norm)
        y, warps = None if y is None else y.contiguous(), min(max(d // (32 * _ELEMENTS_PER_THREAD), 1), _MOST_WARPS)
        _add_norm[(count,)](x, y, rows, post_weight, weight, out, post_eps, eps, width=width, d=d, num_warps=warps)
    return out


@kernel(do_not_specialize_on_alignment=["rows_at"])
def _add_norm(
    x_at, y_at, rows_at, post_weight_at, weight_at, out_at,
    post_eps, eps,
    width: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    row = line
    if rows_at is not None:
        row = tl.load(rows_at + line).to(tl.int64)
    column = tl.arange(0, d)
    inside = column < width
    element = x_at.dtype.element_ty
    x = tl.load(x_at + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if y_at is not None:
        y = tl.load(y_at + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if post_weight_at is not None:
            weight = tl.load(post_weight_at + column, mask=inside, other=0.0)
            y = (y * tl.rsqrt(tl.sum(y * y, 0) / width + post_eps) * weight).to(element).to(tl.float32)
        x = (x + y).to(element).to(tl.float32)
        if rows_at is None:
            tl.store(x_at + row * width + column, x.to(element), mask=inside)
    if weight_at is not None:
        weight = tl.load(weight_at + column, mask=inside, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    if (weight_at is not None) or (rows_at is not None):
        tl.store(out_at + line * width + column, x.to(element), mask=inside)
