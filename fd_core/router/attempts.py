"""Decisions on one request: its worker, the attribution of failures, retries on another worker, and the response.

Gateways only transfer requests and responses; `Attempts` interprets the outcomes and makes every decision. Pure.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from fd_core.router.router import Router
from fd_core.router.selection import NoWorker, RouteRequest, Selection
from fd_core.types import PrefillOutcome

_Answer = TypeVar("_Answer")

_BUSY: Final = frozenset({429, 503})
"""HTTP statuses of a worker that is full: it is not at fault, and another worker may have room."""
_BROKEN: Final = frozenset({500, 502, 504, 508})
"""508: the worker is a router that forwards to this one."""
_NOT_FOUND: Final = 404
_AT_FAULT: Final[frozenset[PrefillOutcome]] = frozenset({"lost", "expired", "damaged"})
"""Outcomes for which the prefill worker is at fault; `held` and `aborted` are not evidence against it."""


def is_refusal(status: int) -> bool:
    """Return True if a retry on another worker may avoid this HTTP status."""
    return status == _NOT_FOUND or status in _BUSY or status in _BROKEN


class Attempts(Generic[_Answer]):
    """The attempts of one request, on one worker after the other until one responds.

    attempts = Attempts(router, request)
    selection = attempts.first(now, rng)
    while selection is not None:
        with selection:              # send the request, and report events: `refused`, `began`, `lost`, `ended`
            ...
        selection = attempts.next(now, rng)    # once nothing of it has reached the client
    attempts.result                  # for the client
    """

    def __init__(self, router: Router, request: RouteRequest) -> None:
        self._router = router
        self._request = request
        self.selection: Selection
        """The attempt that was chosen last."""
        self._kept: _Answer | None = None
        self._none: NoWorker | None = None

    def first(self, now: float, rng: float) -> Selection | None:
        """Return the selection for the first attempt; None if no worker can be chosen."""
        return self._take(self._router.select(self._request, now, rng))

    def next(self, now: float, rng: float) -> Selection | None:
        """Return the selection for a retry after an attempt failed and was released; None if no worker is left."""
        return self._take(self._router.retry(self.selection, now, rng))

    @property
    def result(self) -> _Answer | NoWorker:
        """Response to the client if all attempts failed: the last rejection by a worker, else the router's reason."""
        if self._kept is not None:
            return self._kept
        if self._none is None:
            raise RuntimeError("the last attempt has not failed")
        return self._none

    def prefilled(self, outcome: str | None, now: float) -> None:
        """Record the outcome of a pair's prefill, reported before its answer: a `PrefillOutcome`, or another string."""
        selection = self.selection
        if selection.mode != "pd":
            return
        if outcome == "transferred":
            self._router.prefilled(selection, now)
        elif outcome == "refused":
            self._router.declined(selection, selection.prefill)
        elif outcome in _AT_FAULT:
            self._router.failed(selection, selection.prefill, now)

    def refused(self, status: int, answer: _Answer, now: float, *, no_model: bool = False) -> bool:
        """Record a rejection before the first byte (`no_model`: unknown model); return True to try another worker."""
        if status in _BROKEN:
            self._router.failed(self.selection, self.selection.decode, now)
        elif status in _BUSY or (status == _NOT_FOUND and no_model):
            self._router.declined(self.selection, self.selection.decode)
        else:
            self.selection.first_token()
            return False
        self._kept = answer
        return True

    def began(self) -> None:
        """Record that the first bytes of the answer are sent to the client: no other worker will be tried."""
        self.selection.first_token()

    def lost(self, now: float, *, severe: bool = False) -> None:
        """Record that the worker was lost before or during its answer; `severe` if it was unreachable."""
        self._router.failed(self.selection, self.selection.decode, now, severe=severe)

    def ended(self, status: int, now: float) -> None:
        """Record that its answer is complete; an error response has computed nothing."""
        if status < 400:
            self._router.served(self.selection, now)

    def _take(self, chosen: Selection | NoWorker) -> Selection | None:
        if isinstance(chosen, NoWorker):
            self._none = chosen
            return None
        self.selection = chosen
        return chosen


class Unreached:
    """Tracks since when health checks cannot reach an address, to decide when requests pending there time out."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds after which answers that have begun are ended."""
        self._timeout = timeout
        self._since: dict[str, float] = {}

    def reached(self, url: str) -> None:
        """Record that a check reached the worker, with success or not, or was inconclusive."""
        self._since.pop(url, None)

    def missed(self, url: str, begun: float, now: float) -> bool:
        """Record that a check started at `begun` failed to connect; return True if answers that began should end."""
        return now - self._since.setdefault(url, begun) >= self._timeout

    def forget(self) -> None:
        """Restart the measurement, because this process was suspended."""
        self._since.clear()

    def keep(self, urls: set[str]) -> None:
        """Forget all other addresses."""
        for url in self._since.keys() - urls:
            del self._since[url]
