"""Admission control: KV blocks are kept free for the tokens that running requests will still generate.

Admitting every request that fits right now fills the pool with requests that soon preempt each other. So an admission
looks ahead: it predicts how much longer each running request continues, from the share of `max_tokens` that finished
requests used, and admits only if the peak demand fits (the idea of Past-Future scheduling, Gong et al., 2025).

The horizon depends on the cost of a wrong admission. A shortage preempts a request; if the admitted request
generates as many tokens as its return costs before that happens, admitting it still paid off.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.scheduling.requests import Request
from fd_core.scheduling.running.slots import SlotTable
from fd_core.types import IntArray

_MEMORY: Final = 20
"""Requests that the share of `max_tokens` is averaged over, as the weight of the past; the first ones count more."""
_MOMENTS: Final = 8
"""Sample points at which the demand is added up."""
_LEARN: Final = 0.1
"""Weight of one return in the average cost of returns."""
_RECOMPUTED_TOKEN: Final = 0.5
"""Cost of recomputing a token relative to generating one: many share a step, and its reading of the weights."""


class UsageForecast:
    """Moving estimate of the share of `max_tokens` that requests really generate."""

    def __init__(self) -> None:
        self.share = 0.5
        """Moving average; starts at one half, without data."""
        self._seen = 1

    def observe(self, generated: int, max_tokens: int) -> None:
        """Record a request that ended after `generated` of the `max_tokens` tokens."""
        self._seen = min(self._seen + 1, _MEMORY)
        self.share += (min(generated / max(max_tokens, 1), 1.0) - self.share) / self._seen

    def remaining(self, generated: IntArray, max_tokens: IntArray) -> npt.NDArray[np.int64]:
        """Predict int64[n] remaining tokens, at least 1; requests beyond the average continue for half their length."""
        expected = np.maximum(self.share * max_tokens, 1.5 * generated)
        left: npt.NDArray[np.int64] = np.maximum(np.minimum(expected, max_tokens) - generated, 1).astype(np.int64)
        return left

    def remaining_of(self, generated: int, max_tokens: int) -> int:
        """Predict the tokens that one request will still generate, at least one."""
        expected = max(self.share * max_tokens, 1.5 * generated)
        return max(int(min(expected, max_tokens) - generated), 1)


class ReturnCost:
    """Moving estimate of the share of its tokens that a preempted request recomputes when it returns.

    KV that is found in the prefix cache or loaded costs the other requests nothing: a load takes no part in steps.
    """

    def __init__(self, share: float) -> None:
        """`share` is the expected value before the first return, from 0 to 1."""
        self.share = share

    def observe(self, recomputed: int, tokens: int) -> None:
        """Record a preempted request that returned with `tokens` tokens and has to recompute `recomputed` of them."""
        self.share += _LEARN * (recomputed / max(tokens, 1) - self.share)

    def horizon(self, length: int, block_size: int) -> int:
        """Return steps to look ahead: enough to generate the possible cost of a return, at least a block."""
        return max(int(_RECOMPUTED_TOKEN * self.share * length), block_size)


def peak_growth(
    length: IntArray,
    blocks: IntArray,
    remaining: npt.NDArray[np.int64],
    block_size: int,
    groups: LayerGroups = ONE_GROUP,
) -> int:
    """Return how many blocks beyond the current ones the requests will hold at their peak, at least 0.

    `length`, `blocks` int32[n] are tokens and blocks of each request, `remaining` int64[n] its predicted further
    tokens; all grow by a token a step and free their blocks when they end. The demand peaks just before a request
    ends; if there are many such moments, 8 of them are sampled, the first and the last included.
    """
    if not len(length):
        return 0
    moments, left = np.unique(remaining).astype(np.int32), remaining.astype(np.int32)
    if len(moments) > _MOMENTS:
        moments = moments[np.linspace(0, len(moments) - 1, _MOMENTS).astype(np.intp)]
    grown = groups.blocks(length + moments[:, None], block_size)
    demand = np.where(left >= moments[:, None], grown, 0).sum(axis=1)
    return max(int(demand.max()) - int(blocks.sum()), 0)


class AdmissionControl:
    """Decides if a request fits alongside the running ones, now and while all of them grow."""

    def __init__(self, return_share: float) -> None:
        """`return_share` is the share of its tokens that a preempted request is expected to recompute."""
        self.forecast = UsageForecast()
        self.return_cost = ReturnCost(return_share)
        self.bound: int | None = None
        """Blocks that all may grow by, each at its own peak: where this many are free, an admission costs
        O(1). None where a plan's admissions begin."""

    def growth(self, slots: SlotTable, request: Request, holds: int) -> int:
        """Return the blocks that all will need beyond those that they hold; 0 for a request that runs alone.

        `holds` is the number of blocks that `request` begins with.
        """
        rows = np.flatnonzero(slots.running | slots.loading)
        if not len(rows):
            return 0
        length, size = request.num_tokens, slots.block_size
        lengths = np.append(slots.num_planned[rows], np.int32(length))
        blocks = np.append(slots.num_owned(rows), np.int32(holds))
        left = self.forecast.remaining_of(length - request.prompt_len, request.limit - request.prompt_len)
        remaining = np.append(self._remaining(slots, rows), left)
        horizon = self.return_cost.horizon(length, size)
        return peak_growth(lengths, blocks, np.minimum(remaining, horizon), block_size=size, groups=slots.groups)

    def largest_growth(self, slots: SlotTable) -> int:
        """Return an upper bound of `growth` for the running requests alone: each at its own peak."""
        rows = np.flatnonzero(slots.running | slots.loading)
        if len(rows) == 0:
            return 0
        ends = slots.num_planned[rows] + self._remaining(slots, rows)
        return int(np.maximum(slots.groups.blocks(ends, slots.block_size) - slots.num_owned(rows), 0).sum())

    def _remaining(self, slots: SlotTable, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        prompts = slots.prompt_len[rows]
        return self.forecast.remaining(slots.num_planned[rows] - prompts, slots.limit[rows] - prompts)

    def admits(self, slots: SlotTable, request: Request, needed: int, known: int, free: int) -> bool:
        """Return True if `free` blocks cover `needed` and all growth; the request then counts from now on.

        It begins with `needed` blocks in addition to the `known` ones of its prefix.
        """
        if needed > free:
            return False
        if self.bound is None:
            self.bound = self.largest_growth(slots)
        length, size = request.num_tokens, slots.block_size
        left = self.forecast.remaining_of(length - request.prompt_len, request.limit - request.prompt_len)
        holds = needed + known
        growth = max(slots.groups.blocks(length + left, size) - holds, 0)
        if needed + self.bound + growth > free and needed + self.growth(slots, request, holds) > free:
            return False
        self.bound += growth
        return True
