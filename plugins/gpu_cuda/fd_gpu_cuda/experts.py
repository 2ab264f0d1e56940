"""Mixtures of experts as one operation: the experts' weights one behind the other, for the kernels that need that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from fd_core.ops.contract import Activation, Array, Experts
from fd_core.ops.torch.ops import TorchLinear, TorchOps, route
from fd_core.ops.weights import Weight

from fd_gpu_cuda.packed import PackedLinear, PackedPart, pack_stack

if TYPE_CHECKING:
    from fd_gpu_cuda.kernel_table import Kernels


@dataclass(frozen=True, slots=True)
class StackedExperts(Sequence[Any]):
    """One linear of every expert of a block, each of which is a prepared linear too; gate stands before up."""

    weight: PackedPart | Array
    """[experts * out, in]"""
    experts: int

    @property
    def out(self) -> int:
        """Rows of one expert."""
        weight = self.weight.values if isinstance(self.weight, PackedPart) else self.weight
        return int(weight.shape[0]) // self.experts

    def __len__(self) -> int:
        return self.experts

    def __getitem__(self, expert: Any) -> Any:
        if not 0 <= expert < self.experts:
            raise IndexError(expert)
        rows, weight = slice(expert * self.out, (expert + 1) * self.out), self.weight
        if not isinstance(weight, PackedPart):
            return TorchLinear(weight[rows], None)
        minima = None if weight.minima is None else weight.minima[rows]
        return PackedLinear((replace(weight, values=weight.values[rows], scales=weight.scales[rows], minima=minima),))


ExpertsKernel = Callable[[Array, Experts, Activation, Array | None], Array]
"""Routes x [T, H] to experts that are stacked and adds up their weighted outputs, and to them what is given [T, H]."""


class MixtureOps(TorchOps):
    """Mixtures of experts in a few launches that are the same whatever is chosen, where there is a kernel for them."""

    _kernels: Kernels

    def prepare_experts(self, parts: Sequence[Sequence[Weight]], *, gated: bool) -> Any:
        """Stack the experts; they stay packed where all of them are packed alike."""
        weights = [weight for expert in parts for weight in expert]
        packed = pack_stack(weights, self.device, self._multiplies_8_bits)
        return StackedExperts(self._stack(weights) if packed is None else packed, len(parts))

    def moe(self, x: Array, experts: Experts, activation: Activation) -> Array:
        """Run each expert on the tokens that chose it.

        Without the kernel every expert runs on every token, because a capture must not look at what was chosen.
        """
        if self._kernels.experts is not None:
            shared = None
            if experts.shared_gate_up is not None:
                shared = self.linear(self.gated_linear(x, experts.shared_gate_up, activation), experts.shared_down)
            return self._kernels.experts(x, experts, activation, shared)
        if not self._captured(len(x)):
            return super().moe(x, experts, activation)
        chosen, weights = route(x, experts)
        share = weights.new_zeros(len(x), len(experts.gate_up)).scatter_(1, chosen, weights).to(x.dtype)
        output = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            y = self.linear(self.gated_linear(x, gate_up, activation), down)
            output += y * share[:, expert, None]
        return self.add_shared(output, x, experts, activation)

    def _multiplies_8_bits(self, fp8: bool) -> bool:
        """Say whether activations are rounded to 8 bits, beside weights of whole numbers or FP8."""
        raise NotImplementedError

    def _captured(self, tokens: int) -> bool:
        """Say whether a step of so many tokens may be captured."""
        raise NotImplementedError
