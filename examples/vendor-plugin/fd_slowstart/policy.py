"""The router policy: chooses the worker of a request."""

from __future__ import annotations

from typing import Final

import numpy as np
from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, RouterPolicy, RoutingContext, lowest
from fd_core.router.workers import RouterWorker

__all__ = ["SlowStart"]

RAMP: Final = 60.0
"""Seconds after which a worker is as good as any."""
FLOOR: Final = 0.1
"""Share of the load that a worker gets at first."""


class SlowStart(RouterPolicy):
    """Select the worker with the fewest requests; a new worker starts with a small share, which grows over time.

    A worker that has just started has no requests, so the fewest requests alone would send it all new ones, although
    its cache is empty and its kernels are cold. Here its requests are divided by its share, which grows from `FLOOR`
    to 1 within `RAMP` seconds, as in the slow start of web proxies.
    """

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._first_seen: dict[RouterWorker, float] = {}
        """Time at which each incarnation was first a candidate; those at router start are not new."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate with the fewest requests for its share; the random number decides between equal ones."""
        first = context.now if self._first_seen else context.now - RAMP
        first_seen = np.array([self._first_seen.setdefault(each, first) for each in context.candidates.workers])
        share = np.clip((context.now - first_seen) / RAMP, FLOOR, 1.0)
        requests = context.candidates.requests
        return lowest(context.candidates, context.random, (requests + 1) / share, requests)

    def departed(self, worker: RouterWorker) -> None:
        """Forget an incarnation; the next one at its address starts slowly again."""
        self._first_seen.pop(worker, None)
