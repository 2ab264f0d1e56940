"""The table of kernels that the pack computes with: what is not composed of torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fd_core.ops.contract import Activation, Array, Experts, Heads, Norm, StepInput
from fd_core.ops.torch.sampling import TorchSampling
from fd_core.runner.postprocess.torch_matrix import write_token_matrix

from fd_gpu_cuda.adapters import LoraTable
from fd_gpu_cuda.kv_cache import CudaLayer
from fd_gpu_cuda.packed import PackedProduct

AttentionKernel = Callable[[Array, CudaLayer, Heads, StepInput], Array]
ExpertsKernel = Callable[[Array, Experts, Activation, Array | None], Array]
"""Routes x [T, H] to experts that are stacked and adds up their weighted outputs, and to them what is given [T, H]."""


class SamplingKernels(TorchSampling):
    """What works on logits and token ids; composed of torch's own operations where it is not replaced."""

    def reserve(self, rows: int) -> None:
        """Allocate what a call of up to `rows` rows needs; calls of more take them in parts."""

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array, num_slots: int) -> Array:
        """Return int32[num_slots, 1 + k], see `Postprocess.token_matrix`."""
        return write_token_matrix(sampled, accepted, slots, revoked, num_slots)


class AddNorm(Protocol):
    """A sum and its norm; see `kernels.norms.add_norm`."""

    def __call__(
        self,
        x: Array,
        norm: Norm | None,
        y: Array | None = None,
        post_norm: Norm | None = None,
        rows: Array | None = None,
    ) -> Array:
        """Return the norm of x [T, H] + post_norm(y), of all rows or of some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One function for each operation; all wait for nothing and may be captured, unless they say otherwise.

    Where an operation may be None, None composes it of torch's own operations.
    """

    attention: AttentionKernel | None
    """Of any step, over keys and values as they are or in 8 bits."""
    sampling: SamplingKernels
    """Of everything that works on logits and token ids."""
    packed_product: PackedProduct
    write_kv: Callable[[Array, Array, CudaLayer, Array], None] | None = None
    """`Ops.write_kv`."""
    add_norm: AddNorm | None = None
    """Sums that wait in the residual stream; without it none waits."""
    rotate_and_store: AttentionKernel | None = None
    """Head norms, rope and KV write: qkv [T, (nh + 2 nkv) d] -> q [T, nh, d]."""
    gate: Callable[[Array, Activation], Array] | None = None
    """See `Ops.gate`."""
    experts: ExpertsKernel | None = None
    """`Ops.moe`; None runs every expert on every token of a decode."""
    lora: Callable[[Array, Array, LoraTable, Array], None] | None = None
    """Adds what adapters make of x to y, see `Ops.lora`, by the place of each token's; None walks over adapters."""
    planned_attention: AttentionKernel | None = None
    """Of steps whose metadata is on the host too; never captured. It reads no 8 bits."""

    @property
    def capturable(self) -> bool:
        """Whether decodes may be captured: torch's composition of attention reads lengths on the host."""
        return self.attention is not None
