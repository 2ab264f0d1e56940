"""Measurement of how long a server's event loop is blocked by a request."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Callable
from typing import Final

from tests.server.fakes import LiveServer
from tests.speed import slowdown

LONGEST_STALL: Final = 0.05
"""Seconds on a reference machine; other load only adds to it, so the best of several tries counts."""
TRIES: Final = 5


class Beats:
    """Millisecond heartbeat on a running loop; `longest` is the longest pause in seconds.

    A pause counts only processor time of this process, because other processes also compete for the processors.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.running = False
        self.longest = 0.0

    def begin(self) -> None:
        """Start the heartbeat; called on the loop."""
        self.running = True
        self._last = time.perf_counter(), time.process_time()
        self._loop.call_later(0.001, self.beat)

    def beat(self) -> None:
        """Measure the pause since the last heartbeat."""
        now = time.perf_counter(), time.process_time()
        self.longest = max(self.longest, min(now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now
        if self.running:
            self._loop.call_later(0.001, self.beat)


def stall(server: LiveServer, work: Callable[[], object]) -> float:
    """Return the longest pause of a server's loop in seconds while `work` runs: the minimum of several tries."""

    def once() -> float:
        beats = Beats(server.call(asyncio.get_running_loop))
        server.call(beats.begin)
        work()
        beats.running = False
        server.call(beats.beat)
        return beats.longest

    return least(once)


def least(pause: Callable[[], float]) -> float:
    """Return the shortest of several pauses, in seconds of a reference machine; stop once one is short enough."""
    found = float("inf")
    for _ in range(TRIES):
        found = min(found, pause() / slowdown())
        if found < LONGEST_STALL:
            break
    return found


def post(server: LiveServer, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a raw body; read the whole response without decoding it, because that would hold the GIL."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
