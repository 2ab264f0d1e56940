"""A KV store with timeout and circuit breaker: failed calls are counted, and no exception propagates."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from fd_core.effects.port import OnceLogger
from fd_core.kv.breaker import Breaker, BreakerState
from fd_core.kv.stores.contract import FailureReason, KVStore, StoreError
from fd_core.types.metrics import one_more

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_SEVERE = (FailureReason.TIMEOUT, FailureReason.UNREACHABLE)
_GRACE_SECONDS = 0.1
"""Grace period after a call's timeout before the call counts as hung."""


class GuardedStore:
    """Calls the store for one thread; any thread may check if a call would be made.

    Log lines never hold a key, a value or the text of an error, which a plugin's store wrote.
    """

    def __init__(self, store: KVStore | None, logger: OnceLogger, clock: Callable[[], float]) -> None:
        """Without a `store`, no call is made."""
        self._store = store
        self._shown = "" if store is None else store.location.shown
        self.errors: dict[str, int] = {}
        """Failed calls by reason; replaced, never mutated."""
        self._logger = logger
        self._clock = clock
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._due: float | None = None
        """Deadline of the call in progress."""
        self._hung = False
        """True if the call in progress was already counted as a timeout."""

    @property
    def state(self) -> BreakerState:
        """State of the breaker."""
        return self._breaker.state

    def ready(self) -> bool:
        """Return True if a call would be made at once: the breaker admits it and no call hangs. Thread-safe."""
        if self._store is None:
            return False
        now = self._clock()
        due = self._due
        if due is not None and now > due + _GRACE_SECONDS:
            with self._lock:
                if not self._hung and self._due == due:
                    self._hung = True
                    self._record_failure(FailureReason.TIMEOUT, now)
            return False
        with self._lock:
            return self._breaker.ready(now)

    def call(self, what: str, timeout: float, do: Callable[[KVStore, float], _Result]) -> _Result | None:
        """Return `do(store, timeout)`, None if it failed or the breaker is open; `what` names it in the log."""
        with self._lock:
            now = self._clock()
            if self._store is None or not self._breaker.admit(now):
                return None
            self._due = now + timeout
        try:
            result = do(self._store, timeout)
        except StoreError as error:
            self._fail(error.reason if isinstance(error.reason, FailureReason) else FailureReason.OTHER)
        except Exception as error:  # noqa: BLE001 - a plugin's store: any exception is a failed call
            kind = f"{what}: {type(error).__name__}"
            self._logger.warn(f"KV store {self._shown} broke its contract in {kind}; the call counts as failed")
            self._fail(FailureReason.OTHER)
        else:
            with self._lock:
                self._due = None
                self._hung = False
                self._breaker.success()
            return result
        return None

    def _fail(self, reason: FailureReason) -> None:
        with self._lock:
            known, self._hung = self._hung, False
            self._due = None
            if not known:
                self._record_failure(reason, self._clock())

    def _record_failure(self, reason: FailureReason, now: float) -> None:
        self.errors = one_more(self.errors, reason)
        if reason is FailureReason.MALFORMED:
            self._breaker.success()  # the store works; one bad key must not block all others
        elif self._breaker.failure(now, severe=reason in _SEVERE):
            pause = self._breaker.remaining(now)
            log.warning("KV store %s: %s; no call is made for %.0f s", self._shown, reason, pause)
