"""The kernels of fusions in torch's own operations, for the processor."""

from __future__ import annotations

from fd_core.ops.contract import Activation, Array, Heads, Norm, StepInput
from fd_core.ops.torch.ops import TorchOps

from fd_gpu_cuda.kernel_table import scatter_kv
from fd_gpu_cuda.kv_cache import CudaLayer

CORE = TorchOps()


def plain_add_norm(
    x: Array, norm: Norm | None, y: Array | None = None, post_norm: Norm | None = None, rows: Array | None = None
) -> Array:
    if y is not None:
        y = y if post_norm is None else CORE.rms_norm(y, post_norm)
        x = x.add_(y) if rows is None else x + y
    x = x if rows is None else CORE.gather_rows(x, rows)
    return x if norm is None else CORE.rms_norm(x, norm)


def plain_rotate_and_store(qkv: Array, layer: CudaLayer, heads: Heads, step: StepInput) -> Array:
    q, k, v = CORE.split_heads(qkv, heads)
    q = q if heads.q_norm is None else CORE.rms_norm(q, heads.q_norm)
    k = k if heads.k_norm is None else CORE.rms_norm(k, heads.k_norm)
    scatter_kv(CORE.rope(k, heads.rope, step.positions), v, layer, step.kv_slots)
    return CORE.rope(q, heads.rope, step.positions)


def plain_gate(gate_up: Array, activation: Activation) -> Array:
    return CORE.gate(gate_up, activation)
