"""Gated activations in Triton: one launch reads gate and up and writes their product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Activation, Array

from fd_gpu_cuda.kernels.entry import kernel

_TILE = 1024


def gate(gate_up: Array, activation: Activation) -> Array:
    """[T, 2 I] -> [T, I]: activation(gate) * up, where gate is the first half; waits for nothing."""
    tokens, inner = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, triton.cdiv(inner, _TILE))
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
    x = activated(x, activation, element).to(tl.float32)
    tl.store(out_at + row * inner + column, (x * up).to(element), mask=inside)


@triton.jit
def activated(x, activation: tl.constexpr, element: tl.constexpr):
    """Return activation(x) of float32, rounded to a type as the operation by itself rounds it before a product."""
    if activation == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif activation == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x.to(element)
