"""The prefill side of transfers, as the engine sees it: orders and completions out, effects in, nothing that waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from fd_core.disagg.answers import Answers
from fd_core.disagg.connectors.contract import Connector
from fd_core.disagg.listener import Listener
from fd_core.disagg.orders import Orders
from fd_core.disagg.sending import Sending
from fd_core.disagg.stats import SenderStats, Tally
from fd_core.disagg.terms import Terms
from fd_core.disagg.wire import Wire
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.effects import Cancel, GiveUp, Send, Sent, Transfer
from fd_core.kv.stores.envelope import Envelope
from fd_core.ops.contract import KVCache
from fd_core.types import PrefillJob

__all__ = ["Sender"]

_log = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 0.5
"""For the thread to say that all is over."""


class Sender:
    """Takes leases of decode workers and sends them the blocks that the engine computes.

    The methods belong to the engine's thread and none but `wait` and `close` ever blocks. Every `Send` gets one `Sent`,
    as soon as its blocks were copied to the host or its lease is over; none of them is read afterwards.
    """

    def __init__(
        self,
        cache: KVCache,
        block: BlockFormat,
        terms: Terms,
        envelope: Envelope,
        make_connector: Callable[[str], Connector],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_leases: int,
        max_tokens: int,
        longest: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen at `host:port`, 0 for a free one, and start the thread. Raises `ConfigError` if that cannot be had.

        `cache` bears `export_blocks` from that thread at any time. `make_connector` returns the connector of a name,
        the same at each call, or raises an `FdError`; it is called on that thread, and connectors stay the caller's.
        """
        wire = Wire(envelope, block, max_tokens=max_tokens)
        self._answers: Answers[Sent] = Answers()
        self._orders = Orders()
        self._tally = Tally()
        listener = Listener(wire, self._tally, host, port)
        self.port = listener.port
        self._clock = clock
        self._closed = False
        self._sending = Sending(
            listener,
            cache,
            wire,
            terms,
            make_connector,
            self._answers,
            self._orders,
            self._tally,
            max_leases=max_leases,
            longest=longest,
            clock=clock,
        )
        self._loop = self._sending.loop
        self._loop.start()

    @property
    def on_order(self) -> Callable[[], None]:
        """Called on another thread when there are orders or ended leases to collect; assigned by the engine."""
        return self._orders.on_order

    @on_order.setter
    def on_order(self, wake: Callable[[], None]) -> None:
        self._orders.on_order = wake

    @property
    def open_leases(self) -> int:
        """Leases that are not over."""
        return len(self._sending)

    def orders(self) -> list[PrefillJob]:
        """Return leases that wait for a request, since the last call."""
        return self._orders.collect()

    def refuse(self, lease: str, reason: str) -> None:
        """Turn an order down; `reason` is for people and holds no prompt."""
        self._loop.post(partial(self._sending.refuse, lease, reason))

    def perform(self, effects: Iterable[Transfer]) -> None:
        """Begin sends, hurry cancelled ones, end leases."""
        for effect in effects:
            match effect:
                case Send(operation):
                    self._answers.begin(operation)
                    if not self._loop.post(partial(self._sending.send, effect)):
                        self._answers.give(operation, Sent(operation))
                case GiveUp(lease, reason):
                    self._loop.post(partial(self._sending.give_up, lease, reason))
                case Cancel(operation):
                    if self._answers.give(operation, Sent(operation)):
                        self._loop.post(partial(self._sending.cancel, operation))

    def completed(self) -> list[Sent]:
        """Return the answers since the last call."""
        return self._answers.collect()

    def ended(self) -> list[str]:
        """Return leases that were ordered and are over before their request, since the last call."""
        return self._orders.collect_over()

    def turned(self) -> None:
        """Learn that the engine's loop did a turn; while it does none, decode workers are not told to wait."""
        self._sending.turned_at = self._clock()

    def wait(self, seconds: float) -> None:
        """Wait until `completed` may have something to return, at most `seconds`."""
        self._answers.wait(seconds)

    def stats(self) -> SenderStats:
        """Return counters and gauges."""
        counted = msgspec.convert(self._tally.read(), SenderStats)
        return msgspec.structs.replace(
            counted, open_leases=len(self._sending), waiting_orders=len(self._orders), open_sends=len(self._answers)
        )

    def close(self, seconds: float) -> None:
        """Break every lease off, answer everything and end the thread, within `seconds` and a moment. Idempotent.

        A thread whose copy or connector does not return is left behind; the one send that it copies for is answered
        when it does.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.stop()
        ended = self._loop.join(seconds)
        self._answers.give_rest(Sent)
        if not (ended or self._loop.join(_JOIN_SECONDS)):
            _log.warning("a copy or a call of the connector does not return; its thread is left behind")
