"""The token matrix in torch, without synchronizing with the device."""

from __future__ import annotations

from typing import ClassVar

import torch

from fd_core.ops.contract import Array
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID


class TorchPostprocess(Postprocess):
    """Postprocessor for torch packs on any device."""

    serves: ClassVar[tuple[str, ...]] = ("torch",)

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array) -> Array:
        return write_token_matrix(sampled, accepted, slots, revoked=revoked, num_slots=self.limits.max_num_seqs)


def write_token_matrix(sampled: Array, accepted: Array, slots: Array, revoked: Array, num_slots: int) -> Array:
    """Build the matrix [num_slots, 1 + k] with torch operations; see `Postprocess.token_matrix`."""
    width, device = sampled.shape[1], sampled.device
    matrix = torch.full((num_slots, width), EMPTY_TOKEN_ID, dtype=torch.int32, device=device)
    if width > 1:
        delivered = torch.arange(width, device=device) <= accepted[:, None]
        sampled = torch.where(delivered, sampled, EMPTY_TOKEN_ID)
    matrix[slots] = sampled
    if len(revoked):
        matrix[:, 0].index_fill_(0, revoked.long(), PREEMPTED_TOKEN_ID)
    return matrix
