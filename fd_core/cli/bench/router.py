"""`fdcore bench router`: cost of worker selection with many requests in flight, without HTTP or a model."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from fd_core.cli.bench.results import microseconds
from fd_core.router.router import Router
from fd_core.router.selection import RouteRequest, Selection
from fd_core.types import IntArray

IN_FLIGHT: Final = (100, 1_000, 10_000)
OWN_TOKENS: Final = 256
"""Prompt tokens that follow the system prompt, different for each request."""


class RouterTraffic:
    """A router with `in_flight` requests, all with the same system prompt."""

    def __init__(self, router: Router, *, workers: int, in_flight: int, shared_tokens: int, seed: int) -> None:
        """`router` has no workers yet and gets `workers`; `shared_tokens` are those of the system prompt."""
        self._router = router
        self._draw = np.random.default_rng(seed)
        self._system = self._tokens(shared_tokens)
        for number in range(workers):
            router.health(router.register(f"http://worker{number}", "mixed", 0.0), True, 0.0)
        self._running = [self._select(self._request()) for _ in range(in_flight)]

    def measure(self, requests: int) -> dict[str, Any]:
        """Return the microseconds to select and release `requests`; a random one is released for each new one."""
        self._turn(50)
        select, release = self._turn(requests)
        parts = {"select": select, "release": release, "both": [*map(sum, zip(select, release, strict=True))]}
        times = {name: microseconds(seconds) for name, seconds in parts.items()}
        return {"in_flight": len(self._running), "requests": requests, "us": times}

    def _turn(self, requests: int) -> tuple[list[float], list[float]]:
        """Return the seconds that each selection and each release took."""
        selecting: list[float] = []
        releasing: list[float] = []
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
        return selecting, releasing

    def _select(self, request: RouteRequest) -> Selection:
        selection = self._router.select(request, 0.0, self._draw.random())
        if not isinstance(selection, Selection):
            raise RuntimeError(f"the router chose no worker: {selection.message}")
        return selection

    def _request(self) -> RouteRequest:
        return RouteRequest(np.concatenate((self._system, self._tokens(OWN_TOKENS))))

    def _tokens(self, count: int) -> IntArray:
        return self._draw.integers(32_000, size=count, dtype=np.int32)
