"""The rule of another router, as a policy that the simulator loads from a file."""

from __future__ import annotations

import itertools

from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, RouterPolicy, RoutingContext
from fd_core.router.workers import RouterWorker


class LongestMatch(RouterPolicy):
    """The rule of SGLang's router: the worker with the longest match above a share, or else the least loaded one.

    See `cache_aware` of sglang-router 0.3; its thresholds of imbalance are left out, which these loads do not reach.
    """

    uses_prefix = True
    share = 0.3

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._given: dict[RouterWorker, set[bytes]] = {}

    def choose(self, context: RoutingContext) -> Candidate:
        """The longest match, or the smallest tree."""
        given = {one.worker: self._given.setdefault(one.worker, set()) for one in context.candidates}

        def match(one: Candidate) -> int:
            return sum(1 for _ in itertools.takewhile(given[one.worker].__contains__, context.keys))

        best = max(context.candidates, key=match)
        if match(best) <= self.share * len(context.keys):
            best = min(context.candidates, key=lambda one: len(given[one.worker]))
        given[best.worker].update(context.keys)
        return best
