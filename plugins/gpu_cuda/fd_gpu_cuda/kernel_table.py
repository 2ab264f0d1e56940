"""The table of kernels that the pack computes with: what is not composed of torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fd_core.ops.contract import Array, Heads, SampleInput, StepInput
from fd_core.ops.torch_attention import TorchLayer

from fd_gpu_cuda.packed import PackedProduct

__all__ = ["AttentionKernel", "Kernels"]

AttentionKernel = Callable[[Array, TorchLayer, Heads, StepInput], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One function for each operation; all wait for nothing and may be captured, unless they say otherwise.

    Where an operation may be None, None composes it of torch's own operations.
    """

    attention: AttentionKernel
    """Of any step."""
    sample: Callable[[Array, SampleInput], tuple[Array, Array]]
    """Without filters."""
    mask_logits: Callable[[Array, Array, Array], Array]
    packed_product: PackedProduct
    planned_attention: AttentionKernel | None = None
    """Of steps whose metadata is on the host too; never captured."""
