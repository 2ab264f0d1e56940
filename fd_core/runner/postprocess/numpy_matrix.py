"""The token matrix in numpy."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fd_core.runner.postprocess.contract import Postprocess
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID
from fd_core.types import IntArray


class NumpyPostprocess(Postprocess):
    """Postprocessor for packs whose integers are numpy arrays."""

    serves: ClassVar[tuple[str, ...]] = ("numpy",)

    def token_matrix(self, sampled: IntArray, accepted: IntArray, slots: IntArray, revoked: IntArray) -> IntArray:
        width = sampled.shape[1]
        matrix = np.full((self.limits.max_num_seqs, width), EMPTY_TOKEN_ID, np.int32)
        if width > 1:
            sampled = np.where(np.arange(width) <= accepted[:, None], sampled, EMPTY_TOKEN_ID)
        matrix[slots] = sampled
        if len(revoked):
            matrix[revoked, 0] = PREEMPTED_TOKEN_ID
        return matrix
