"""Log-probabilities of a prompt, collected while its chunks are computed and delivered with the first token.

They are kept by position: what is computed a second time after a preemption is written over what was there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray, PromptLogprobRows, TokenLogprobs


class PromptLogprobs:
    """Of one request; there is none for the first token of a prompt."""

    def __init__(self, prompt_len: int, top_n: int) -> None:
        """`top_n` most likely tokens are kept for each position."""
        self._chosen = np.full(prompt_len - 1, np.nan, np.float32)
        self._top_ids = np.zeros((prompt_len - 1, top_n), np.int32)
        self._top = np.zeros((prompt_len - 1, top_n), np.float32)
        self._ranks = np.zeros(prompt_len - 1, np.int32)

    def take(self, rows: PromptLogprobRows, mine: IntArray) -> None:
        """Keep rows `mine` int[n] of what a step computed."""
        places, top_n = rows.positions[mine] - 1, self._top.shape[1]
        self._chosen[places] = rows.chosen[mine]
        self._top_ids[places] = rows.top_ids[mine, :top_n]
        self._top[places] = rows.top[mine, :top_n]
        self._ranks[places] = rows.ranks[mine]

    def delivered(self) -> tuple[TokenLogprobs, ...]:
        """Return them in the order of the prompt."""
        columns = self._chosen.tolist(), self._top_ids.tolist(), self._top.tolist(), self._ranks.tolist()
        return tuple(
            TokenLogprobs(chosen, tuple(ids), tuple(top), rank) for chosen, ids, top, rank in zip(*columns, strict=True)
        )


class PooledState:
    """Of one request; a mean begins anew where the prompt does, as after a preemption."""

    def __init__(self, *, mean: bool) -> None:
        self.mean = mean
        self._sum: npt.NDArray[np.float64] = np.zeros(0)
        self._count = 0

    def take(self, start: int, count: int, value: npt.NDArray[np.float32]) -> None:
        """Add what a step computed from `count` tokens, the first of them at position `start`."""
        if self.mean and start:
            self._sum = self._sum + value
            self._count += count
        else:
            self._sum, self._count = value.astype(np.float64), count

    def delivered(self) -> bytes:
        """Return the vector as float32, little-endian."""
        return (self._sum / self._count).astype("<f4").tobytes()
