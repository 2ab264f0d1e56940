"""The token matrix of a step, by whatever kernel the pack has for it."""

from __future__ import annotations

from typing import ClassVar

from fd_core.ops.contract import Array
from fd_core.runner.postprocess.contract import Postprocess

__all__ = ["CudaPostprocess"]


class CudaPostprocess(Postprocess):
    """For the backend `gpu_cuda`, whose pack writes the matrix in one launch."""

    serves: ClassVar[tuple[str, ...]] = ("gpu_cuda",)

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array) -> Array:
        """Build the token matrix of the step."""
        return self.ops.token_matrix(sampled, accepted, slots, revoked, self.limits.max_num_seqs)
