"""The engine's main loop: receives messages, runs steps, sends their results.

The same loop runs in the engine's process and, with `--engine inproc`, in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from fd_core.engine.core import AdmissionSink, Engine
from fd_core.engine.process import messages
from fd_core.errors import FdError
from fd_core.types import Delta

_STATS_SECONDS = 0.25
_IDLE_SECONDS = 0.5


class Inbox(Protocol):
    """The queue of messages from the client."""

    def receive(self, timeout: float) -> list[messages.ClientMessage]:
        """Return the messages that arrived; wait up to `timeout` seconds for the first one, not at all if it is 0."""

    def wake(self) -> None:
        """End the current wait in `receive`, or the next one. Called from any thread."""


def admission_notifier(send: Callable[[messages.EngineMessage], None], epoch: int) -> AdmissionSink:
    """Return a callback that notifies the client of the requests that the engine of this epoch admits to slots."""
    return lambda admitted: send(messages.StepEvents([], epoch=epoch, admitted=admitted))


class EngineService:
    """Message handling of an engine, and its reports after each turn. The caller runs the steps and keeps time."""

    def __init__(self, engine: Engine, send: Callable[[messages.EngineMessage], None]) -> None:
        self.engine = engine
        self.stopping = False
        """True if the engine accepts no more requests and ends once it is idle."""
        self._send = send
        self._last_stats = 0.0
        self._last_sent: messages.EngineStats | None = None
        self._was_busy = True

    def take(self, received: Iterable[messages.ClientMessage]) -> list[Delta]:
        """Apply the client's messages; return the last deltas of requests that they ended."""
        engine, deltas = self.engine, []
        for message in received:
            match message:
                case messages.Submit(spec):
                    deltas += engine.submit(spec)
                case messages.Abort(request_ids, everything):
                    deltas += engine.abort_all() if everything else engine.abort(request_ids)
                case messages.QueryActivities():
                    self._send(messages.Activities(engine.activities()))
                case messages.Control(ticket, order):
                    engine.control(order, partial(self._controlled, ticket))
                case messages.Shutdown(drain):
                    self.stopping = True
                    engine.stop()
                    deltas += [] if drain else engine.abort_all()
        return deltas

    def _controlled(self, ticket: int, error: FdError | None) -> None:
        """Send the result of an order."""
        failure = (None, None) if error is None else (str(error), error.field)
        self._send(messages.Controlled(ticket, self.engine.info, *failure))

    def send(self, deltas: list[Delta], now: float) -> bool:
        """Send the results of a turn, and periodic statistics; return True if there is work. `now` in seconds."""
        engine = self.engine
        busy = engine.has_work
        news: messages.EngineStats | None = None
        # Statistics are sent as soon as the engine turns idle, so that gauges are exact whenever nothing runs. Writes
        # to a KV store continue after that, so an idle engine sends changes as well.
        if now - self._last_stats >= _STATS_SECONDS or (self._was_busy and not busy):
            stats, self._last_stats = engine.stats(), now
            if stats != self._last_sent:
                news = self._last_sent = stats
        kv = engine.take_kv_events() if engine.kv_events else ()
        prefills = engine.take_prefill_traces() if engine.prefill_traces else ()
        if deltas or news is not None or kv or prefills:
            self._send(messages.StepEvents(deltas, news, engine.info.epoch, kv=kv, prefills=prefills))
        self._was_busy = busy
        return busy


def serve_engine(engine: Engine, inbox: Inbox, send: Callable[[messages.EngineMessage], None]) -> None:
    """Serve until a `Shutdown` arrives. An error of a step ends the loop: the client sees a dead engine."""
    service = EngineService(engine, send)
    # Statistics are available before the first request, too.
    busy = service.send([], time.monotonic())
    while busy or not service.stopping:
        deltas = service.take(inbox.receive(0.0 if busy else _IDLE_SECONDS))
        deltas += engine.step()
        busy = service.send(deltas, time.monotonic())
    engine.close()
