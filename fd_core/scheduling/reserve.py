"""The admission reserve: blocks kept for what running requests will still grow to.

Admitting whoever fits right now fills the pool with requests that soon take each other's blocks. So an admission looks
ahead: it predicts how much longer each running request goes on, from what finished requests really used of what they
asked for, and admits only if the largest demand at any moment to come fits (the idea of Past-Future scheduling, Gong et
al., 2025).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray

__all__ = ["UsageForecast", "peak_growth"]

_MEMORY = 0.95
"""Weight of the past in the share of `max_tokens` that requests use."""


class UsageForecast:
    """Learns which share of their `max_tokens` requests really generate."""

    def __init__(self) -> None:
        self.share = 0.5
        """Moving average; starts in the middle, knowing nothing."""

    def observe(self, generated: int, asked: int) -> None:
        """A request ended after `generated` of the `asked` tokens."""
        self.share = _MEMORY * self.share + (1 - _MEMORY) * min(generated / max(asked, 1), 1.0)

    def remaining(self, generated: IntArray, asked: IntArray) -> npt.NDArray[np.int64]:
        """Predict int64[n]: tokens that running requests will still generate, at least one each.

        A request that outgrew the average is expected to go on for half as long as it already did.
        """
        expected = np.maximum(self.share * asked, 1.5 * generated)
        left: npt.NDArray[np.int64] = np.maximum(np.minimum(expected, asked) - generated, 1).astype(np.int64)
        return left


def peak_growth(length: IntArray, blocks: IntArray, remaining: npt.NDArray[np.int64], block_size: int) -> int:
    """Return how many blocks beyond today's the requests will hold at their worst moment, at least 0.

    `length`, `blocks` int32[n] are tokens and blocks of each request, `remaining` int64[n] its predicted further
    tokens. Requests end in order of `remaining`, and give their blocks back when they do.
    """
    if not len(length):
        return 0
    order = np.argsort(remaining, kind="stable")
    ends = remaining[order]
    held = blocks[order].astype(np.int64)
    grown = -(-(length[order] + ends) // block_size)
    growth = np.maximum(grown - held, 0)
    # At the end of request i those that end later have grown about as long as it has; those before it are gone.
    later = np.arange(len(ends), 0, -1)
    extra = growth * later - (np.cumsum(held) - held)
    return max(int(extra.max()), 0)
