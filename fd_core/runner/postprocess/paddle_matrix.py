"""The token matrix in Paddle, without synchronizing with the device.

Paddle does not promote integers and rejects an empty scatter, hence the casts and the checks of shapes.
"""

from __future__ import annotations

from typing import ClassVar

from fd_core.ops.contract import Array
from fd_core.ops.paddle.framework import paddle
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID


class PaddlePostprocess(Postprocess):
    """Postprocessor for Paddle packs on any device."""

    serves: ClassVar[tuple[str, ...]] = ("paddle",)

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array) -> Array:
        rows, width = sampled.shape
        matrix = paddle.full([self.limits.max_num_seqs, width], EMPTY_TOKEN_ID, "int32", device=sampled.place)
        if rows:
            delivered = paddle.arange(width, dtype="int32", device=sampled.place) <= accepted.unsqueeze(1)
            empty = paddle.full_like(sampled, EMPTY_TOKEN_ID)
            matrix = paddle.scatter(matrix, slots, paddle.where(delivered, sampled, empty))
        if revoked.shape[0]:
            released = paddle.full_like(revoked, PREEMPTED_TOKEN_ID)
            matrix = paddle.scatter(matrix.flatten(), revoked * width, released).reshape(matrix.shape)
        return matrix
