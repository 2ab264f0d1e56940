"""How long the event loop of a server stands still while it is given something to do."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Callable
from typing import Final

from tests.server.fakes import LiveServer

LONGEST_STALL: Final = 0.05
"""Seconds; what else runs on the machine only adds, so the best of several tries counts."""
TRIES: Final = 5


class Heartbeat:
    """Beats on a server's loop every millisecond while its block runs; `longest` is the longest pause.

    A pause lasts as long as this process computed in it: other processes take the processors away, too.
    """

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._loop = server.call(asyncio.get_running_loop)
        self._running = False
        self.longest = 0.0

    def __enter__(self) -> Heartbeat:
        self._running = True
        self._server.call(self._begin)
        return self

    def __exit__(self, *error: object) -> None:
        self._running = False
        self._server.call(self._beat)

    def _begin(self) -> None:
        self._last = time.perf_counter(), time.process_time()
        self._loop.call_later(0.001, self._beat)

    def _beat(self) -> None:
        now = time.perf_counter(), time.process_time()
        self.longest = max(self.longest, min(now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now
        if self._running:
            self._loop.call_later(0.001, self._beat)


def stall(server: LiveServer, work: Callable[[], object]) -> float:
    """Return the longest pause of the loop in seconds while `work` runs, the least of several tries."""
    least = float("inf")
    for _ in range(TRIES):
        with Heartbeat(server) as heart:
            work()
        least = min(least, heart.longest)
        if least < LONGEST_STALL:
            break
    return least


def post(server: LiveServer, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a body as it is; the answer is read whole and not decoded, since that would hold the interpreter."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
