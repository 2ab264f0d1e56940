"""The port between an engine's loop and KV outside the device: effects go out, completions come in, nothing waits.

What performs an effect (storage and host tier, or transfers between workers) is behind the port, on threads of its own.
The engine joins the two with `JoinedKVPort` and puts `NullKVPort` where it has none.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, TypeVar

from fd_core.kv.effects import Cancel, Completion, Effect

__all__ = ["CompletionQueue", "JoinedKVPort", "KVPort", "NullKVPort"]

_Stats = TypeVar("_Stats", covariant=True)
_Offload = TypeVar("_Offload", covariant=True)
_Transfer = TypeVar("_Transfer", covariant=True)


class KVPort(ABC, Generic[_Stats]):
    """Performs effects for one engine. The methods belong to the engine's thread; only `wait` and `close` block.

    Operation numbers are unique within an engine, whichever port performs the operation.
    """

    performs: ClassVar[tuple[type[Effect], ...]] = ()
    """Types of the effects that this port performs, `Cancel` left out: every port takes that."""

    @abstractmethod
    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin effects in order. A `Cancel` of an operation that is unknown here or over is ignored."""

    @abstractmethod
    def completions(self) -> list[Completion]:
        """Return the completions since the last call, those of operations that are past their deadline included."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until `completions` may have something to return, at most `seconds`."""

    @abstractmethod
    def stats(self) -> _Stats:
        """Return counters and gauges."""

    @abstractmethod
    def close(self) -> None:
        """Complete every operation and end the threads, within seconds. Idempotent."""


class CompletionQueue:
    """Completions on their way to the engine's thread, from whichever thread and port."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called, on any thread, when the queue is no longer empty: it ends the sleep of an idle engine."""
        self._wake = wake
        self._lock = threading.Lock()
        self._completions: deque[Completion] = deque()
        self._filled = threading.Event()

    def put(self, completion: Completion) -> None:
        """Add a completion. Any thread."""
        with self._lock:
            was_empty = not self._completions
            self._completions.append(completion)
            self._filled.set()
        if was_empty:
            self._wake()

    def take(self) -> list[Completion]:
        """Return the completions since the last call."""
        if not self._completions:
            return []
        with self._lock:
            taken = list(self._completions)
            self._completions.clear()
            self._filled.clear()
        return taken

    def wait(self, seconds: float) -> None:
        """Wait until there is a completion, at most `seconds`."""
        self._filled.wait(max(0.0, seconds))


class NullKVPort(KVPort[None]):
    """Stands where an engine has no such port: there is nothing to perform."""

    def perform(self, effects: Iterable[Effect]) -> None:
        """Raise `ValueError` for any effect but `Cancel`: it would never be completed."""
        for effect in effects:
            if not isinstance(effect, Cancel):
                raise ValueError(f"this engine has nothing that performs {type(effect).__name__}")

    def completions(self) -> list[Completion]:
        """Return nothing."""
        return []

    def wait(self, seconds: float) -> None:
        """Return at once."""

    def stats(self) -> None:
        """Return nothing."""

    def close(self) -> None:
        """Do nothing."""


class JoinedKVPort(KVPort[tuple[_Offload, _Transfer]]):
    """The two ports of an engine as one: each effect goes to the port that performs its type, a `Cancel` to both."""

    def __init__(self, queue: CompletionQueue, offload: KVPort[_Offload], transfer: KVPort[_Transfer]) -> None:
        """`queue` is the one that both ports put their completions into."""
        self._queue = queue
        self._offload = offload
        self._transfer = transfer
        self._ports: dict[type[Effect], KVPort[object]] = {
            effect: port for port in (offload, transfer) for effect in port.performs
        }

    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin effects, in order within each port. Raises `ValueError` for an effect that neither port performs."""
        for effect in effects:
            if isinstance(effect, Cancel):
                self._offload.perform((effect,))
                self._transfer.perform((effect,))
            elif (port := self._ports.get(type(effect))) is not None:
                port.perform((effect,))
            else:
                raise ValueError(f"this engine has nothing that performs {type(effect).__name__}")

    def completions(self) -> list[Completion]:
        """Return the completions of both ports."""
        return self._offload.completions() + self._transfer.completions()

    def wait(self, seconds: float) -> None:
        """Wait until either port may have completed something, at most `seconds`."""
        self._queue.wait(seconds)

    def stats(self) -> tuple[_Offload, _Transfer]:
        """Return the counters and gauges of both ports."""
        return self._offload.stats(), self._transfer.stats()

    def close(self) -> None:
        """Close both ports."""
        self._offload.close()
        self._transfer.close()
