"""Port between an engine's loop and work outside steps: takes effects, returns completions, never blocks.

The components that perform effects (storage and host tier, transfers between workers, the compiler of grammars) run
on separate threads.
An engine joins its ports with `JoinedEffectPort`.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import numpy.typing as npt

from fd_core.effects.operations import Cancel, Completion, Effect
from fd_core.ops.contract import KVCache
from fd_core.types import IntArray

_log = logging.getLogger(__name__)

_MOST_LOGGED: Final = 64
"""Limit of distinct warnings: some originate in another process."""

_Stats = TypeVar("_Stats", covariant=True)
_Offload = TypeVar("_Offload", covariant=True)
_Transfer = TypeVar("_Transfer", covariant=True)
_Compiler = TypeVar("_Compiler", covariant=True)


class CompletionQueue:
    """Completions for the engine's thread, from any thread and port."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called, on any thread, when the queue is no longer empty: it ends the sleep of an idle engine."""
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: deque[Completion] = deque()
        self._filled = threading.Event()

    def put(self, completion: Completion) -> None:
        """Add a completion. Thread-safe."""
        with self._lock:
            was_empty = not self._waiting
            self._waiting.append(completion)
            self._filled.set()
        if was_empty:
            self._wake()

    def take(self) -> list[Completion]:
        """Return the completions since the last call."""
        if not self._waiting:
            return []
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
            self._filled.clear()
        return taken

    def wait(self, seconds: float) -> None:
        """Wait until there is a completion, at most `seconds`."""
        self._filled.wait(max(0.0, seconds))


class OnceLogger:
    """Logs each warning once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def warn(self, sentence: str) -> None:
        """Log a warning, unless it was logged before or there were too many others."""
        with self._lock:
            if sentence in self._logged or len(self._logged) >= _MOST_LOGGED:
                return
            self._logged.add(sentence)
        _log.warning("%s", sentence)


class EffectPort(ABC, Generic[_Stats]):
    """Performs effects for one engine. The methods belong to the engine's thread; only `wait` and `close` block.

    Operation numbers are unique within an engine, across its ports. A port counts in fields of its statistics: each
    field is written by one thread, or under one lock, and `stats` copies them at any time.
    """

    performs: ClassVar[tuple[type[Effect], ...]] = ()
    """Types of the effects that this port performs, without `Cancel`, which every port handles."""
    idle = False
    """True if `tend` has nothing to do until the port performs an operation."""

    def __init__(self, queue: CompletionQueue) -> None:
        """Put completions into `queue`; the ports of one engine share theirs."""
        self._queue = queue

    @abstractmethod
    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin effects in order. A `Cancel` of an operation that is unknown here or over is ignored."""

    def tend(self) -> None:
        """Complete the operations that are past their deadline, and do other periodic work."""

    def completions(self) -> list[Completion]:
        """Return the completions since the last call, those of operations that are past their deadline included."""
        self.tend()
        return self._queue.take()

    def wait(self, seconds: float) -> None:
        """Wait until `completions` may have something to return, at most `seconds`."""
        self._queue.wait(seconds)

    @abstractmethod
    def stats(self) -> _Stats:
        """Return counters and gauges."""

    @abstractmethod
    def close(self) -> None:
        """Complete every operation and end the threads, within seconds. Idempotent."""


class JoinedEffectPort(EffectPort[tuple[_Offload | None, _Transfer | None, _Compiler | None]]):
    """The ports of an engine as one: each effect goes to the port that performs its type, a `Cancel` to all."""

    def __init__(
        self,
        queue: CompletionQueue,
        offload: EffectPort[_Offload] | None,
        transfer: EffectPort[_Transfer] | None,
        compiler: EffectPort[_Compiler] | None = None,
    ) -> None:
        """`queue` is the one that the ports put their completions into."""
        super().__init__(queue)
        self._offload = offload
        self._transfer = transfer
        self._compiler = compiler
        self._ports: list[EffectPort[object]] = [port for port in (offload, transfer, compiler) if port is not None]
        self._port_of = {effect: port for port in self._ports for effect in port.performs}

    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin effects, in order within each port. Raises `ValueError` for an effect that no port performs."""
        for effect in effects:
            if isinstance(effect, Cancel):
                for port in self._ports:
                    port.perform((effect,))
            elif type(effect) in self._port_of:
                self._port_of[type(effect)].perform((effect,))
            else:
                raise ValueError(f"no port of this engine performs {type(effect).__name__}")

    def tend(self) -> None:
        """Tend the ports that are not idle."""
        for port in self._ports:
            if not port.idle:
                port.tend()

    def stats(self) -> tuple[_Offload | None, _Transfer | None, _Compiler | None]:
        """Return the counters and gauges of each port."""
        offload = None if self._offload is None else self._offload.stats()
        transfer = None if self._transfer is None else self._transfer.stats()
        compiler = None if self._compiler is None else self._compiler.stats()
        return offload, transfer, compiler

    def close(self) -> None:
        """Close the ports."""
        for port in self._ports:
            port.close()


class CacheOwner(Protocol):
    """Holder of a cache, which it may replace by one of the same shape while nothing is copied."""

    cache: KVCache


class LockedKVCache(KVCache):
    """Serializes the copies of several threads from one cache, which supports only one copy at a time."""

    def __init__(self, owner: CacheOwner) -> None:
        cache = owner.cache
        self.shape = cache.shape
        self.num_blocks = cache.num_blocks
        self.spare_block = cache.spare_block
        self._owner = owner
        self._lock = threading.Lock()

    def layer(self, index: int) -> Any:
        """Return the pack's handle of one layer."""
        return self._owner.cache.layer(index)

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks to the host, see `KVCache.export_blocks`."""
        with self._lock:
            return self._owner.cache.export_blocks(blocks)

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write blocks from the host, see `KVCache.import_blocks`."""
        with self._lock:
            self._owner.cache.import_blocks(blocks, data)
