"""Graceful shutdown of a server: it announces the drain, then rejects new requests, then waits for running ones.

    serving --stop requested--> leaving --after `delay`--> refusing --nothing runs, or after `seconds`--> over

While it leaves, /ready answers 503, every response has `DRAINING_HEADER` and closes its connection, and requests are
still served, so that load balancers have time to notice. Server and router share this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

DRAINING_HEADER: Final = "X-Draining"
"""Header of responses of a draining server: a router sends it no further requests, and does not count a failure."""


class Drain:
    """Progress of one server's shutdown, from the order to stop to the end."""

    def __init__(self) -> None:
        self.leaving = False
        self.refusing = False
        self.running = 0
        """Requests being answered, for which the drain waits; the gates count them."""

    async def refuse_after(self, delay: float, hurry: asyncio.Event) -> None:
        """Announce the drain, and start rejecting requests after `delay` seconds, or once `hurry` is set."""
        self.leaving = True
        if delay and not hurry.is_set():
            log.info("draining: new requests are accepted for another %g s", delay)
        await _passed(delay, hurry)
        self.refusing = True

    async def wait(self, seconds: float, hurry: asyncio.Event, also: Callable[[], bool] = lambda: False) -> None:
        """Wait until no request runs and `also` is false, `seconds` have passed or `hurry` is set."""
        log.info("shutting down: %d running requests, waiting up to %g s", self.running, seconds)
        ends = time.monotonic() + seconds
        while (self.running or also()) and not hurry.is_set() and (left := ends - time.monotonic()) > 0:
            await _passed(min(0.05, left), hurry)


async def _passed(seconds: float, hurry: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(hurry.wait(), seconds)
