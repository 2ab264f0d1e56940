"""The decode side of transfers, as the engine sees it: effects in, completions out, and nothing that waits."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from fd_core.disagg.answers import Answers
from fd_core.disagg.connectors.contract import Connector
from fd_core.disagg.fetching import Fetching
from fd_core.disagg.stats import ReceiverStats, Tally
from fd_core.disagg.terms import Terms
from fd_core.disagg.wire import MAX_WINDOW, Wire
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.effects import Cancel, Fetch, Fetched, Transfer
from fd_core.kv.stores.envelope import Envelope
from fd_core.ops.contract import KVCache

__all__ = ["Receiver"]

_log = logging.getLogger(__name__)

_GRACE_SECONDS: Final = 1.0
"""After the longest time of a lease: the thread that should have ended it is stuck in a call then."""
_JOIN_SECONDS: Final = 0.5
"""For the thread to say that all is over."""


class Receiver:
    """Opens leases at prefill workers and copies what they send into the blocks of each fetch.

    The methods belong to the engine's thread and none but `wait` and `close` ever blocks. Every `Fetch` gets one
    `Fetched`, within `longest` seconds and a moment, and none of its blocks is written afterwards.
    """

    def __init__(
        self,
        cache: KVCache,
        block: BlockFormat,
        terms: Terms,
        envelope: Envelope,
        connector: Connector,
        *,
        window: int = 8,
        silence: float = 10.0,
        longest: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread.

        `cache` bears `import_blocks` from that thread at any time. `window` pieces of a lease may be on their way at
        once; after `silence` seconds without a word from a prefill worker its leases expire. The connector stays the
        caller's and is closed after this.
        """
        if not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"a window of {window} pieces is not within 1 to {MAX_WINDOW}")
        self._clock = clock
        self._longest = longest
        self._answers: Answers[Fetched] = Answers()
        self._tally = Tally()
        self._overdue: deque[tuple[float, int]] = deque()
        self._closed = False
        self._fetching = Fetching(
            cache,
            Wire(envelope, block),
            terms,
            connector,
            self._answers,
            self._tally,
            window=window,
            silence=silence,
            longest=longest,
            clock=clock,
        )
        self._loop = self._fetching.loop
        self._loop.start()

    @property
    def open_leases(self) -> int:
        """Fetches that were not answered."""
        return len(self._answers)

    def perform(self, effects: Iterable[Transfer]) -> None:
        """Begin fetches and hurry cancelled ones."""
        for effect in effects:
            match effect:
                case Fetch(operation):
                    self._begin(effect, operation)
                case Cancel(operation):
                    if self._finish(Fetched(operation, "aborted", reason="nobody waits for it any more")):
                        self._loop.post(partial(self._fetching.abort, operation))

    def completed(self) -> list[Fetched]:
        """Return the answers since the last call."""
        if self._overdue and self._overdue[0][0] <= (now := self._clock()):
            while self._overdue and self._overdue[0][0] <= now:
                number = self._overdue.popleft()[1]
                if self._finish(Fetched(number, "expired", reason="the transfer takes too long")):
                    self._loop.post(partial(self._fetching.abort, number))
        return self._answers.collect()

    def wait(self, seconds: float) -> None:
        """Wait until `completed` may have something to return, at most `seconds`."""
        self._answers.wait(seconds)

    def stats(self) -> ReceiverStats:
        """Return counters and gauges."""
        counted = msgspec.convert(self._tally.read(), ReceiverStats)
        return msgspec.structs.replace(counted, open_leases=len(self._answers), peers=len(self._fetching.connections))

    def close(self, seconds: float) -> None:
        """Answer everything and end the thread, within `seconds` and a moment. Idempotent.

        A thread whose copy or connector does not return is left behind; the one fetch that it copies for is answered
        when it does.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.stop()
        ended = self._loop.join(seconds)
        for answer in self._answers.give_rest(lambda number: Fetched(number, "aborted", reason="the engine ends")):
            self._tally.add_labelled("outcomes", answer.outcome)
        if not (ended or self._loop.join(_JOIN_SECONDS)):
            _log.warning("a copy or a call of the connector does not return; its thread is left behind")

    def _begin(self, effect: Fetch, operation: int) -> None:
        if not len(effect.blocks):
            self._answers.begin(operation)
            self._finish(Fetched(operation, "held"))
            return
        now = self._clock()
        self._answers.begin(operation)
        self._overdue.append((now + self._longest + _GRACE_SECONDS, operation))
        if not self._loop.post(partial(self._fetching.open, effect, now)):
            self._finish(Fetched(operation, "aborted", reason="the engine ends"))

    def _finish(self, answer: Fetched) -> bool:
        given = self._answers.give(answer.operation, answer)
        if given:
            self._tally.add_labelled("outcomes", answer.outcome)
        return given
