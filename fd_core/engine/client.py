"""How servers and notebooks speak to an engine, wherever it runs."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Sequence

from fd_core.engine.messages import EngineInfo, EngineStats
from fd_core.kv.event_log import KVEventLog
from fd_core.types import Delta, RequestSpec

__all__ = ["EngineClient", "StartProgress"]

StartProgress = Callable[[str, int, int], None]
"""Called with (phase, done, total) while an engine starts; phases are `load` (bytes) and `warmup` (steps)."""


class EngineClient(abc.ABC):
    """A connection to one engine, used from one asyncio event loop.

    Opened by `fd_core.engine.launch.open_client`. Every method is safe after the engine has died. Its requests go on,
    with the same text, in the engine that replaces it; until then new requests are refused.
    """

    info: EngineInfo
    """Valid from the moment the client was opened; replaced when the engine restarts with a new epoch."""
    kv_log: KVEventLog | None = None
    """Events about the prefixes that the device holds; None unless `kv_events` is on. The log outlives the engine."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """Whether the engine answers; false from its death until a restart is ready."""

    @abc.abstractmethod
    def submit(self, spec: RequestSpec) -> AsyncIterator[Delta]:
        """Start a request and return its deltas; the last one carries a finish reason.

        The request starts at once, not at the first `anext`. Closing the iterator before its end (`aclose`) aborts
        the request. Deltas that are not fetched pile up; nothing else waits for a slow reader. Raises `BadRequest` if
        a request with this id runs already and `EngineDead` if there is no engine. If the engine dies later, the
        iterator pauses until another engine has resumed the request; it ends with finish reason `error` if engines keep
        dying with this request (see `fd_core.engine.request_ledger`) and raises `EngineDead` if none can be started.
        """

    @abc.abstractmethod
    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Abort the named requests and return those that were running or waiting. Idempotent.

        Requests of an engine that died end at once. Raises `EngineDead` if no engine will replace it.
        """

    @abc.abstractmethod
    def abort_all(self) -> list[str]:
        """Abort everything and return the ids."""

    @property
    @abc.abstractmethod
    def active_requests(self) -> int:
        """Requests submitted by this client that have not ended."""

    @property
    @abc.abstractmethod
    def requests_requeued(self) -> int:
        """Requests given to a new epoch because the one before died with them; only grows."""

    @property
    @abc.abstractmethod
    def stats(self) -> EngineStats:
        """The latest statistics that the engine sent, at most about half a second old."""

    @abc.abstractmethod
    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for up to `drain_seconds`, abort the rest and stop the engine."""
