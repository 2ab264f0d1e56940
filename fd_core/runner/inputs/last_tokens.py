"""The last token of each slot, on the device: what a step takes from the one before without a look at it."""

from __future__ import annotations

import numpy as np

from fd_core.ops.contract import Array, Ops
from fd_core.runner.inputs.inputs import Rows
from fd_core.types import IntArray

Fed = tuple[Array | None, Array]
"""Where in a step's tokens some are put that the host does not know, int32[n], and whose they are, int32[n].

The places are None for all tokens of a step: then there is a slot for each, the one behind the last for padding.
"""


class LastTokens:
    """int32[num_slots + 1, 1] on the device; the last row holds 0, for rows that only fill a step up.

    Kept for packs that queue: behind a step that a pack computes in the call, the host knows all tokens.
    """

    def __init__(self, ops: Ops, num_slots: int) -> None:
        self._ops = ops
        self._num_slots = num_slots
        self._tokens = ops.from_host(np.zeros((num_slots + 1, 1), np.int32))

    def gather(self, rows: Rows, unsettled: IntArray, total: int) -> Fed | None:
        """Say on the host what a step of `total` tokens, padding included, takes from here; None for nothing.

        `unsettled` int32[num_slots] counts the tokens of each slot that the host does not know.
        """
        fed = unsettled[rows.slots].nonzero()[0]
        if not len(fed):
            return None
        if len(fed) == len(rows.slots) and (rows.shape is None or rows.shape[1] == 1):  # one token in each row
            slots = np.full(total, self._num_slots, np.int32)
            slots[: len(fed)] = rows.slots
            return None, slots
        return (rows.begins + rows.counts - 1)[fed], rows.slots[fed]

    def feed(self, token_ids: Array, fed: Fed) -> Array:
        """Put last tokens, as `gather` said, into the tokens int32[T] of a step."""
        places, slots = fed
        tokens = self._ops.gather_rows(self._tokens, slots)
        if places is not None:
            tokens = self._ops.write_rows(token_ids.reshape(-1, 1), places, tokens)
        return tokens.reshape(-1)

    def keep(self, slots: Array, grid: Array) -> None:
        """Remember what a step sampled: int32[N], int32[N, 1 + k] of rows without drafts; of others nobody asks."""
        self._tokens = self._ops.write_rows(self._tokens, slots, grid[:, :1])
