"""How many bytes the KV cache may take. Pure arithmetic."""

from __future__ import annotations

__all__ = ["GRAPH_BYTES", "kv_bytes", "step_bytes"]

GRAPH_BYTES = 256 * 2**20
"""Kept for captured graphs, workspaces of cuBLAS and FlashInfer, and compiled kernels."""
_BYTES_PER_HIDDEN = 96
"""A token's activations for each element of the hidden state: the residual, what a norm holds in float32, queries, keys
and values, and gate and up, which are some five times as wide."""
_BYTES_PER_LOGIT = 48
"""Logits in float32, and what sampling with filters holds beside them: weights and running sums in float64, and the
order as int64."""


def step_bytes(*, tokens: int, rows: int, hidden: int, vocabulary: int) -> int:
    """Return what the largest step takes beside weights and KV: `tokens` computed, logits of `rows` of them."""
    return tokens * hidden * _BYTES_PER_HIDDEN + rows * vocabulary * _BYTES_PER_LOGIT


def kv_bytes(free: int, step: int) -> int:
    """Return what is left of `free` bytes once the largest step and the graphs have theirs; 0 if they do not fit."""
    return max(free - step - GRAPH_BYTES, 0)
