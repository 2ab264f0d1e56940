"""The queue of waiting requests, ordered by the policy."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fd_core.scheduling.policies import Policy
from fd_core.scheduling.requests import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """A heap of requests by policy rank; removal is lazy, so that an abort costs nothing."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, Request]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        """Add a request; a preempted one returns to the place that its rank gives it."""
        if request.rank is None:
            request.rank = self._policy.rank(request)
        self._members.add(request.arrival)
        heapq.heappush(self._heap, (request.rank, request.arrival, request))

    def remove(self, request: Request) -> None:
        """Forget a request."""
        self._members.discard(request.arrival)

    def pop(self) -> Request | None:
        """Take the first request, or None."""
        while self._heap:
            request = heapq.heappop(self._heap)[2]
            if request.arrival in self._members:
                self._members.remove(request.arrival)
                return request
        return None

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        return (request for _, _, request in self._heap if request.arrival in self._members)
