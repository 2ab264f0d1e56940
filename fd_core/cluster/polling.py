"""What processes of a deployment say of themselves over HTTP, and what routers are told of workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import msgspec

from fd_core.cluster.scaling import quantile
from fd_core.router.workers import Role

_TIMEOUT: Final = aiohttp.ClientTimeout(total=5, connect=3)
_WINDOW_SECONDS: Final = 30.0
_SHARE: Final = 0.9
_AGAIN_SECONDS: Final = 10.0
"""Between registrations of one worker, which change nothing unless the router forgot it."""


class _Slots(msgspec.Struct):
    running: int = 0
    loading: int = 0
    waiting: int = 0


class _BlockCounts(msgspec.Struct):
    used: int = 0
    fenced: int = 0
    total: int = 0


class _SchedulerSays(msgspec.Struct):
    slots: _Slots = msgspec.field(default_factory=_Slots)
    blocks: _BlockCounts = msgspec.field(default_factory=_BlockCounts)


class _StatsSay(msgspec.Struct):
    scheduler: _SchedulerSays = msgspec.field(default_factory=_SchedulerSays)


class _EngineSays(msgspec.Struct):
    max_num_seqs: int = 0


class _HistogramSays(msgspec.Struct):
    bounds: list[float] = []
    counts: list[int] = []


class _SecondsSay(msgspec.Struct):
    time_to_first_token: _HistogramSays = msgspec.field(default_factory=_HistogramSays)


class _StatusPage(msgspec.Struct):
    """What is read of a worker's /status.json."""

    not_ready: str | None = None
    engine: _EngineSays = msgspec.field(default_factory=_EngineSays)
    stats: _StatsSay = msgspec.field(default_factory=_StatsSay)
    seconds: _SecondsSay = msgspec.field(default_factory=_SecondsSay)


_status: Final = msgspec.json.Decoder(_StatusPage)


@dataclass(slots=True)
class FirstTokens:
    """A worker's histogram of times to the first token, as it was read in the last half minute."""

    bounds: Sequence[float] = ()
    _read: deque[tuple[float, Sequence[int]]] = field(default_factory=deque)

    def add(self, now: float, bounds: Sequence[float], counts: Sequence[int]) -> None:
        """Note what was read."""
        if self._read and (tuple(bounds) != self.bounds or sum(counts) < sum(self._read[-1][1])):
            self._read.clear()  # another process
        self.bounds = tuple(bounds)
        self._read.append((now, counts))
        while len(self._read) > 2 and now - self._read[1][0] > _WINDOW_SECONDS:
            self._read.popleft()

    @property
    def counts(self) -> list[int]:
        """How many requests got their first token within each bound in that time."""
        first, last = (self._read[0][1], self._read[-1][1]) if self._read else ((), ())
        return [after - before for before, after in zip(first, last, strict=True)]


@dataclass(frozen=True, slots=True)
class Doing:
    """What a worker does at a moment."""

    running: int = 0
    waiting: int = 0
    slots: int = 0
    blocks_used: int = 0
    blocks: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks that are not free."""
        return self.blocks_used / self.blocks if self.blocks else 0.0


def total_doing(workers: Iterable[Doing]) -> Doing:
    """Return what several workers do together."""
    each = list(workers)
    return Doing(
        sum(one.running for one in each),
        sum(one.waiting for one in each),
        sum(one.slots for one in each),
        sum(one.blocks_used for one in each),
        sum(one.blocks for one in each),
    )


def late_first_token(workers: Iterable[FirstTokens]) -> float | None:
    """Return the time to the first token that nine of ten requests did not exceed; None without requests."""
    read = [each for each in workers if each.bounds]
    same = [each.counts for each in read if each.bounds == read[0].bounds]
    return quantile(_SHARE, read[0].bounds, [sum(column) for column in zip(*same, strict=True)]) if read else None


@dataclass(frozen=True, slots=True)
class ProcessAnswer:
    """What a process said when it was asked."""

    healthy: bool = False
    ready: bool = False
    instance: str = ""
    """Names the process and its engine; empty for a router."""
    doing: Doing = field(default_factory=Doing)


async def ask(session: aiohttp.ClientSession, url: str, first: FirstTokens | None, now: float) -> ProcessAnswer:
    """Ask a worker, or a router if there are no times to `first` tokens, how it is. Never raises for its answers."""
    try:
        async with session.get(f"{url}/health", timeout=_TIMEOUT, allow_redirects=False) as answer:
            healthy, instance = answer.status == 200, answer.headers.get("X-Instance", "")
        if first is None:
            return ProcessAnswer(healthy, healthy)
        async with session.get(f"{url}/status.json", timeout=_TIMEOUT, allow_redirects=False) as answer:
            page = _status.decode(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, ValueError):
        return ProcessAnswer()
    slots, blocks, read = page.stats.scheduler.slots, page.stats.scheduler.blocks, page.seconds.time_to_first_token
    first.add(now, read.bounds, read.counts)
    doing = Doing(
        slots.running + slots.loading,
        slots.waiting,
        page.engine.max_num_seqs,
        blocks.used + blocks.fenced,
        blocks.total,
    )
    return ProcessAnswer(healthy, healthy and page.not_ready is None, instance, doing)


class RouterAdmin:
    """Tells one router of workers, by the admin port that it announced."""

    def __init__(self, session: aiohttp.ClientSession, url: str, secret: str) -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._one_at_a_time = asyncio.Lock()
        self._told: dict[str, tuple[str, float]] = {}
        """Workers' addresses to the instance that was registered, and when."""

    async def register(self, url: str, role: Role, instance: str, now: float, serves: Callable[[], bool]) -> str:
        """Let it send requests to a worker, unless it was told that of late; return what went wrong, if anything.

        `serves` is asked last: whether the worker is still to be registered.
        """
        async with self._one_at_a_time:
            told, at = self._told.get(url, ("", 0.0))
            if not serves() or (told == instance and now - at < _AGAIN_SECONDS):
                return ""
            trouble = await self._post("register", {"url": url, "role": role, "instance": instance})
            if not trouble:
                self._told[url] = instance, now
            return trouble

    async def deregister(self, url: str) -> None:
        """Let it send no more requests to a worker."""
        async with self._one_at_a_time:
            if self._told.pop(url, None) is not None:
                await self._post("deregister", {"url": url})

    async def _post(self, what: str, body: dict[str, str]) -> str:
        try:
            async with self._session.post(
                f"{self._url}/{what}", json=body, headers=self._headers, timeout=_TIMEOUT, allow_redirects=False
            ) as answer:
                return "" if answer.status == 200 else f"it answered {answer.status}: {(await answer.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__
