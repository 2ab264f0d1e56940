"""What models call in few launches: each fusion takes a kernel where the table has one, and is composed elsewhere."""

from __future__ import annotations

from typing import Any

from fd_core.ops.contract import Activation, Array, Experts, Heads, Lora, Norm, StepInput
from fd_core.ops.torch.ops import TorchOps

from fd_gpu_cuda.kernel_table import AddNorm, Kernels
from fd_gpu_cuda.kv_cache import CudaLayer


class Residual:
    """The residual stream: what it was, and a product that waits to be added until a norm reads both.

    The sum is written over what it was, once; whoever comes later finds no product waiting.
    """

    __slots__ = ("_add_norm", "_post_norm", "_product", "_states")

    def __init__(self, add_norm: AddNorm, states: Array, product: Array, post_norm: Norm | None) -> None:
        self._add_norm = add_norm
        self._states = states
        self._product: Array | None = product
        self._post_norm = post_norm

    def read(self, norm: Norm | None) -> Array:
        """Add what waits, and return the norm of the sum [T, H], or the sum itself without one."""
        if self._product is None and norm is None:
            return self._states
        found = self._add_norm(self._states, norm, self._product, self._post_norm)
        self._product = None
        return found

    def rows(self, norm: Norm, rows: Array) -> Array:
        """Return the norm of some rows of the sum [R, H], and leave the rest to wait."""
        return self._add_norm(self._states, norm, self._product, self._post_norm, rows)


class FusedOps(TorchOps):
    """The fusions over a table of kernels."""

    _kernels: Kernels

    def settle(self, residual: Any) -> Array:
        """Add what waits."""
        return residual.read(None) if isinstance(residual, Residual) else residual

    def rms_norm(self, x: Any, norm: Norm) -> Array:
        """Normalize the last axis, in one launch with the sum before it."""
        if isinstance(x, Residual):
            return x.read(norm)
        add_norm = self._kernels.add_norm
        if add_norm is None or x.dim() != 2 or not x.is_contiguous():
            return super().rms_norm(x, norm)
        return add_norm(x, norm)

    def gate(self, gate_up: Array, activation: Activation) -> Array:
        """Activate the first half and multiply, in one launch."""
        kernel = self._kernels.gate
        return super().gate(gate_up, activation) if kernel is None else kernel(gate_up, activation)

    def attention_inputs(
        self,
        x: Any,
        norm: Norm,
        qkv: Any,
        heads: Heads,
        layer: CudaLayer,
        step: StepInput,
        lora: Lora | None = None,
    ) -> Array:
        """Norm, product, and all that follows it in one launch."""
        kernel = self._kernels.rotate_and_store
        if kernel is None:
            return super().attention_inputs(x, norm, qkv, heads, layer, step, lora)
        normed = self.rms_norm(x, norm)
        projected = self.linear(normed, qkv)
        if lora is not None:
            projected = self.lora(projected, normed, lora)
        return kernel(projected, layer, heads, step)

    def project_residual(
        self, x: Array, weight: Any, residual: Any, post_norm: Norm | None = None, lora: Lora | None = None
    ) -> Any:
        """Multiply; the sum waits for the next norm."""
        add_norm = self._kernels.add_norm
        if add_norm is None:
            return super().project_residual(x, weight, residual, post_norm, lora)
        y = self.linear(x, weight)
        if lora is not None:
            y = self.lora(y, x, lora)
        return Residual(add_norm, self.settle(residual), self.all_reduce(y), post_norm)

    def moe_residual(self, x: Any, norm: Norm, experts: Experts, activation: Activation) -> Any:
        """Norm and experts; the sum waits for the next norm."""
        add_norm = self._kernels.add_norm
        if add_norm is None:
            return super().moe_residual(x, norm, experts, activation)
        y = self.moe(self.rms_norm(x, norm), experts, activation)
        return Residual(add_norm, self.settle(x), self.all_reduce(y), None)

    def logits(
        self, x: Any, norm: Norm, head: Any, rows: Array, softcap: float | None = None, *, split: bool = False
    ) -> Array:
        """Gather, sum and norm in one launch, and the output projection."""
        add_norm = self._kernels.add_norm
        if add_norm is None:
            return super().logits(x, norm, head, rows, softcap, split=split)
        normed = x.rows(norm, rows) if isinstance(x, Residual) else add_norm(x, norm, rows=rows)
        logits = self.logits_of(normed, head, softcap)
        return self.all_gather(logits) if split else logits
