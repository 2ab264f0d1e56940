"""The admission reserve: blocks kept for what running requests will still grow to.

Admitting whoever fits right now fills the pool with requests that soon take each other's blocks. So an admission looks
ahead: it predicts how much longer each running request goes on, from what finished requests really used of what they
asked for, and admits only if the largest demand to come fits (the idea of Past-Future scheduling, Gong et al., 2025).

How far it looks ahead depends on what being wrong costs. A shortage sends somebody back to wait; if whoever is admitted
gets on by as much as a return costs before that happens, admitting was worth it all the same.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray

__all__ = ["ReturnCost", "UsageForecast", "peak_growth"]

_MEMORY: Final = 20
"""Requests that the share of `max_tokens` is averaged over, as the weight of the past; the first ones teach more."""
_MOMENTS: Final = 8
"""Moments at which the demand is added up."""
_LEARN: Final = 0.1
"""Weight of one return in the average cost of returns."""
_RECOMPUTED_TOKEN: Final = 0.5
"""What computing a token again costs of generating one: many of them share a step, and its reading of the weights."""


class UsageForecast:
    """Learns which share of their `max_tokens` requests really generate."""

    def __init__(self) -> None:
        self.share = 0.5
        """Moving average; starts in the middle, knowing nothing."""
        self._seen = 1

    def observe(self, generated: int, asked: int) -> None:
        """A request ended after `generated` of the `asked` tokens."""
        self._seen = min(self._seen + 1, _MEMORY)
        self.share += (min(generated / max(asked, 1), 1.0) - self.share) / self._seen

    def remaining(self, generated: IntArray, asked: IntArray) -> npt.NDArray[np.int64]:
        """Predict int64[n]: tokens that running requests will still generate, at least one each.

        A request that outgrew the average is expected to go on for half as long as it already did.
        """
        expected = np.maximum(self.share * asked, 1.5 * generated)
        left: npt.NDArray[np.int64] = np.maximum(np.minimum(expected, asked) - generated, 1).astype(np.int64)
        return left


class ReturnCost:
    """Learns which share of its tokens a preempted request computes again when it comes back.

    What is found in the prefix cache or loaded costs the others nothing: a load takes no part in steps.
    """

    def __init__(self, share: float) -> None:
        """`share` is what to expect before the first return, from 0 to 1."""
        self.share = share

    def observe(self, recomputed: int, tokens: int) -> None:
        """A request came back with `tokens`, of which it has `recomputed` to compute again."""
        self.share += _LEARN * (recomputed / max(tokens, 1) - self.share)

    def horizon(self, length: int, block_size: int) -> int:
        """Return how many steps to look ahead before a request of `length` tokens is admitted, at least a block's.

        By then it has generated what bringing it back may cost, and filled a block, so that nobody is sent to and fro
        without getting on.
        """
        return max(int(_RECOMPUTED_TOKEN * self.share * length), block_size)


def peak_growth(length: IntArray, blocks: IntArray, remaining: npt.NDArray[np.int64], block_size: int) -> int:
    """Return how many blocks beyond today's the requests will hold at their worst moment, at least 0.

    `length`, `blocks` int32[n] are tokens and blocks of each request, `remaining` int64[n] its predicted further
    tokens; all grow by a token a step and give their blocks back when they end. The demand is greatest when somebody
    is about to end; if there are many such moments, 8 of them are looked at, the first and the last included.
    """
    if not len(length):
        return 0
    moments, left = np.unique(remaining).astype(np.int32), remaining.astype(np.int32)
    if len(moments) > _MOMENTS:
        moments = moments[np.linspace(0, len(moments) - 1, _MOMENTS).astype(np.intp)]
    grown = -(-(length + moments[:, None]) // block_size)
    demand = np.where(left >= moments[:, None], grown, 0).sum(axis=1)
    return max(int(demand.max()) - int(blocks.sum()), 0)
