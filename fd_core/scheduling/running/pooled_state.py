"""The vector of a request that wants one of its prompt, collected while the prompt's chunks are computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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
