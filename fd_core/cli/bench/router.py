"""`fdcore bench router`: what choosing a worker costs beside many requests in flight, without HTTP or a model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fd_core.router.router import Router
from fd_core.router.selection import RouteRequest, Selection
from fd_core.types import IntArray

__all__ = ["IN_FLIGHT", "OWN_TOKENS", "RouterTimes", "RouterTraffic"]

IN_FLIGHT: Final = (100, 1_000, 10_000)
OWN_TOKENS: Final = 256
"""Prompt tokens that follow the system prompt, different for each request."""
_WARM_UP: Final = 50
"""Requests that are not measured."""
_VOCAB_SIZE: Final = 32_000


@dataclass(frozen=True, slots=True)
class RouterTimes:
    """Seconds that each measured request took: its selection, and the release of another one."""

    select_s: tuple[float, ...]
    release_s: tuple[float, ...]

    def figures(self, in_flight: int) -> dict[str, Any]:
        """Return median and p99 of `select`, `release` and both together, in microseconds, as plain values."""
        both = tuple(map(sum, zip(self.select_s, self.release_s, strict=True)))
        parts = {"select": self.select_s, "release": self.release_s, "both": both}
        return {
            "in_flight": in_flight,
            "requests": len(both),
            "us": {
                name: {"median": float(np.median(seconds)) * 1e6, "p99": float(np.percentile(seconds, 99)) * 1e6}
                for name, seconds in parts.items()
            },
        }


class RouterTraffic:
    """A router that has `in_flight` requests, all with the same system prompt."""

    def __init__(self, router: Router, *, workers: int, in_flight: int, shared_tokens: int, seed: int) -> None:
        """`router` has no workers yet and gets `workers`; `shared_tokens` are those of the system prompt."""
        self._router = router
        self._draw = np.random.default_rng(seed)
        self._system = self._tokens(shared_tokens)
        for number in range(workers):
            router.health(router.register(f"http://worker{number}", "mixed", 0.0), True, 0.0)
        self._running = [self._select(self._request()) for _ in range(in_flight)]

    def measure(self, requests: int) -> RouterTimes:
        """Let requests come and go, one for one, and time `requests` of them. A random one leaves each time."""
        self._turn(_WARM_UP)
        return self._turn(requests)

    def _turn(self, requests: int) -> RouterTimes:
        selecting, releasing = [], []
        for leaving in self._draw.integers(len(self._running), size=requests):
            request, ended = self._request(), self._running[leaving]
            begin = time.perf_counter()
            self._running[leaving] = self._select(request)
            selected = time.perf_counter()
            ended.first_token()
            self._router.served(ended, 0.0)
            ended.release()
            releasing.append(time.perf_counter() - selected)
            selecting.append(selected - begin)
        return RouterTimes(tuple(selecting), tuple(releasing))

    def _select(self, request: RouteRequest) -> Selection:
        selection = self._router.select(request, 0.0, self._draw.random())
        if not isinstance(selection, Selection):
            raise RuntimeError(f"the router chose no worker: {selection.message}")
        return selection

    def _request(self) -> RouteRequest:
        return RouteRequest(np.concatenate((self._system, self._tokens(OWN_TOKENS))))

    def _tokens(self, count: int) -> IntArray:
        return self._draw.integers(_VOCAB_SIZE, size=count, dtype=np.int32)
