"""The token matrix of a step, by whatever kernel the pack has for it."""

from __future__ import annotations

from typing import ClassVar

from fd_core.config import Limits
from fd_core.ops.contract import Array, Ops
from fd_core.runner.postprocess.contract import Postprocess


class CudaPostprocess(Postprocess):
    """For the backend `gpu_cuda`, whose pack writes the matrix in one launch."""

    serves: ClassVar[tuple[str, ...]] = ("gpu_cuda",)

    def __init__(self, ops: Ops, limits: Limits) -> None:
        # torch is needed to compute, not to know of the postprocessor.
        from fd_gpu_cuda.ops import CudaOps

        super().__init__(ops, limits)
        if not isinstance(ops, CudaOps):
            raise TypeError(f"{type(ops).__name__} is not the pack of gpu_cuda")
        self._pack = ops

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array) -> Array:
        """Build the token matrix of the step."""
        return self._pack.token_matrix(sampled, accepted, slots, revoked, self.limits.max_num_seqs)
