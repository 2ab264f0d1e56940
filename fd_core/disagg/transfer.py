"""Code shared by both sides of transfers: a port to the engine, and the thread that serves its leases in turn."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from fd_core.disagg.connectors.contract import Connector, KVInbox, KVOutbox
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.disagg.stats import SideStats
from fd_core.effects.operations import ChangeTransfers
from fd_core.effects.port import CompletionQueue, EffectPort, OnceLogger
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.types.metrics import one_more

_log = logging.getLogger(__name__)

ENGINE_ENDS: Final = "the engine ends"
_CLOSE_SECONDS: Final = 2.0
"""Timeout for a copy in progress and for pending messages."""
_JOIN_SECONDS: Final = 0.5
"""Timeout of joining the thread."""


class _Machine(Protocol):
    @property
    def next_tick(self) -> float: ...


class _Lease(Protocol):
    @property
    def machine(self) -> _Machine: ...
    @property
    def to_copy(self) -> deque[Any]: ...
    def __hash__(self) -> int: ...


_Stats = TypeVar("_Stats", bound=SideStats)
_Kept = TypeVar("_Kept", bound=_Lease)


class KVTransfer(EffectPort[_Stats], Generic[_Stats, _Kept]):
    """A port whose thread owns connections, the connector's ends and the copies; leases take turns."""

    def __init__(
        self,
        thread: str,
        queue: CompletionQueue,
        stats: _Stats,
        compatibility: KVCompatibility,
        clock: Callable[[], float],
        stuck_seconds: float,
        make_loop: Callable[..., ThreadLoop],
    ) -> None:
        """Name the thread, which the side starts; after `stuck_seconds` without an iteration it is stuck in a call."""
        super().__init__(queue)
        self._stuck_seconds = stuck_seconds
        self._turned_at = clock()
        """Time of the thread's last iteration, or of the first operation that requires one since."""
        self._clock = clock
        self._compatibility = compatibility
        self._stats = stats
        self._logger = OnceLogger()
        self._loop = make_loop(thread, self._turn, self._end_all)
        self._connectors: dict[str, Connector] = {}
        self._leases: dict[str, _Kept] = {}
        self._copying: dict[_Kept, None] = {}
        """Leases with pieces to copy, the next one first."""
        self._due = math.inf
        """Time of the next timeout of a lease; a message never moves it forward."""
        self._closed = False

    # The engine's thread ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End leases, operations, thread and connectors; a thread in a hung call is abandoned. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.stop()
        ended = self._loop.join(_CLOSE_SECONDS)
        self._complete_all(ENGINE_ENDS)
        if not (ended or self._loop.join(_JOIN_SECONDS)):
            _log.warning("a copy or a call of the connector does not return; its thread is abandoned")
        for connector in self._connectors.values():
            connector.close()

    def _watch(self, pending: int) -> None:
        """Complete every operation if the thread is stuck in a call, so that no request waits for its return."""
        now = self._clock()
        if not pending:
            self._turned_at = now
        elif now - self._turned_at > self._stuck_seconds:
            self._complete_all("a copy or a call of the connector does not return")

    @abstractmethod
    def _complete_all(self, reason: str) -> None:
        """Complete every operation early. Thread-safe."""

    # The thread of transfers ------------------------------------------------------------------------------

    def _change(self, effect: ChangeTransfers) -> None:
        """Describe the KV of other weights to peers from now on."""
        if effect.weights:
            self._compatibility = msgspec.structs.replace(self._compatibility, weights=effect.weights)

    @abstractmethod
    def _copy(self, lease: _Kept) -> None:
        """Copy the next pieces of a lease, at least one, and remove them from `to_copy`."""

    @abstractmethod
    def _tick(self, lease: _Kept, now: float) -> None:
        """Process the timeouts of a lease."""

    @abstractmethod
    def _end_all(self) -> None:
        """End every lease and close the connections, as the thread ends."""

    def _tidy(self, now: float) -> float:
        """Close idle connections; return the seconds until the next idle timeout."""
        return math.inf

    def _close_end(self, end: KVInbox | KVOutbox) -> None:
        try:
            end.close()
        except Exception as error:  # noqa: BLE001 - a plugin's connector, despite the contract
            self._failed("connector", "close", error)

    def _failed(self, part: str, call: str, error: Exception) -> None:
        """Count a failed call of the `cache` or `connector`, and log its kind once, never its text."""
        self._stats.errors = one_more(self._stats.errors, part)
        self._logger.warn(
            f"the {part} of transfers failed in {call}: {type(error).__name__}; "
            "such prompts are computed where they are decoded"
        )

    def _turn(self) -> float:
        """Copy some pieces and process timeouts; return the seconds until the next one."""
        self._turned_at = self._clock()
        if self._copying:
            lease = next(iter(self._copying))
            del self._copying[lease]
            if lease.to_copy:
                self._copy(lease)
            if lease.to_copy:
                self._copying[lease] = None
        now = self._clock()
        if now >= self._due:
            self._due = now + self._tidy(now)
            for lease in list(self._leases.values()):
                if lease.machine.next_tick <= now:
                    self._tick(lease, now)
                self._due = min(self._due, lease.machine.next_tick)
        return 0.0 if self._copying else self._due - self._clock()
