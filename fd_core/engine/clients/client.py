"""Clients of engines, for servers and notebooks: one stream of deltas per request, wherever the engine runs."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from fd_core.config import EngineConfig
from fd_core.engine.clients.request_ledger import RequestLedger
from fd_core.engine.process import messages
from fd_core.errors import BadRequest, EngineDead, FdError
from fd_core.kv.blocks import BlockStats
from fd_core.kv.event_log import KVEventLog
from fd_core.scheduling.contract import RequestActivity, SchedulerStats
from fd_core.types import Delta, FinishReason, PrefillTrace, RequestSpec

if TYPE_CHECKING:
    from fd_core.engine.clients.data_parallel import DataParallelClient

_log = logging.getLogger(__name__)
_MAX_FAILED_STARTS = 5
"""Failed starts in a row after which new and waiting requests are rejected."""
_FIRST_SECONDS = 1.0
"""Pause after the first failed start, in seconds; it doubles with each further one."""
_LONGEST_SECONDS = 60.0
_STATE = -1
"""Ticket of the orders that give a restarted engine the state of the one before."""
_REPORT_INTERVAL = 0.25
"""Shortest interval between two reports of an engine's requests, in seconds: clients may poll at any rate."""
_REPORT_SECONDS = 1.0
"""Timeout for a report, which a long step delays; the previous one is used instead."""
StartProgress = Callable[[str, int, int], None]
"""Called with (phase, done, total) while an engine starts; phases are `prepare` (the backend's kernels), `load` (bytes)
and `warmup` (steps)."""
EngineClient: TypeAlias = "SingleEngineClient | DataParallelClient"
"""Interface of a server to one engine, or to several of one model on this machine; used from one event loop.

Opened by `fd_core.engine.clients.launch.open_client`.
"""


def pause_after(failures: int) -> float:
    """Return the seconds between a failed start and the next one; `failures` are those in a row."""
    return min(_FIRST_SECONDS * 2.0 ** min(failures - 1, 30), _LONGEST_SECONDS)


class DeltaStream(AsyncIterator[Delta]):
    """Deltas of one request; unread deltas are merged into one."""

    def __init__(
        self, client: SingleEngineClient, request_id: str, on_news: Callable[[Delta | None], None] | None = None
    ) -> None:
        """`on_news` is called with each delta once it arrives, read or not, and with None if none is the last one."""
        self._client = client
        self._request_id = request_id
        self._on_news = on_news
        self._pending: list[Delta] = []
        self._failure: str | None = None
        self._wake: asyncio.Future[None] | None = None
        self.done = False
        """True if the last delta was read, or the reader has left."""
        self.weight_version = ""
        """Name of the weights that computed the last delta; empty before the first."""
        self.submitted = time.perf_counter()
        """Time of submission, in seconds of `time.perf_counter`."""
        self.admitted: float | None = None
        """Time at which it first entered a slot; None before."""

    def push(self, delta: Delta) -> None:
        """Append the next delta."""
        self.weight_version = self._client.info.weight_version
        self._pending.append(delta)
        if self._on_news is not None:
            self._on_news(delta)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def fail(self, message: str) -> None:
        """End with `EngineDead` once the received deltas are fetched."""
        self._failure = message
        if self._on_news is not None:
            self._on_news(None)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def __anext__(self) -> Delta:
        """Return the deltas received since the last call, merged; wait for one if there is none."""
        if self.done:
            raise StopAsyncIteration
        while not self._pending:
            if self._failure is not None:
                self.done = True
                raise EngineDead(self._failure)
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        pending, self._pending = self._pending, []
        delta = pending[0] if len(pending) == 1 else _merged(pending)
        self.done = delta.finish_reason is not None
        return delta

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        self.abort()

    def abort(self) -> None:
        """Abort the request unless it has ended, without blocking."""
        if not self.done:
            self.done = True
            self._client._drop_request(self._request_id)
            if self._on_news is not None:
                self._on_news(None)


class ActiveRequest(msgspec.Struct, frozen=True):
    """A request that has not ended, as its client knows it."""

    request_id: str
    prompt_tokens: int
    generated_tokens: int
    """Tokens delivered so far."""
    submitted: float
    """Its arrival, by `time.perf_counter`."""
    activity: RequestActivity | None
    """None if no engine has the request, or has reported it yet."""

    @property
    def seconds(self) -> float:
        """Age of the request."""
        return time.perf_counter() - self.submitted


class EngineControls(abc.ABC):
    """The orders of operators and trainers as methods. Each raises `BadRequest`, and then nothing has changed."""

    @abc.abstractmethod
    async def control(self, order: messages.ControlOrder) -> None:
        """Return once an order is carried out."""

    async def pause(self) -> None:
        """Preempt every running request and save its KV; all requests, and new ones, wait until `resume`."""
        await self.control(messages.PauseGeneration())

    async def resume(self) -> None:
        """Continue every request where it was paused."""
        await self.control(messages.ResumeGeneration())

    async def sleep(self, level: int = 1) -> None:
        """Pause, and release the memory of the KV cache, at level 2 also that of the weights, until `wake_up`."""
        await self.control(messages.Sleep(level))

    async def wake_up(self) -> None:
        """Restore KV cache and weights, and continue every request."""
        await self.control(messages.WakeUp())

    async def reset_prefix_cache(self) -> None:
        """Forget the prefixes in the device cache."""
        await self.control(messages.ResetPrefixCache())

    async def update_weights(self, path: str | Path, version: str | None = None) -> None:
        """Replace the weights between two steps by those in a folder, of the same shapes; requests continue with them.

        `version` names them in answers, by default the number of updates. Raises `BadRequest`, and then nothing has
        changed.
        """
        await self.control(messages.UpdateWeights(str(path), version))


class SingleEngineClient(EngineControls):
    """A connection to one engine, used from one event loop; subclasses carry messages and start engines.

    Every method is safe after the engine has died. If another one will be started, streams pause, and the new epoch
    resumes each request with the same text; until then new requests are rejected. If none will be, streams end.
    """

    info: messages.EngineInfo
    """Valid once the client is open; replaced when the engine restarts with a new epoch."""
    kv_log: KVEventLog | None = None
    """Events about prefixes in the device cache; None unless `kv_events` is on. The log outlives the engine."""
    kv_index: int = 0

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        """Settings for new engines: a later one also serves the adapters that were loaded meanwhile."""
        self._ledger = RequestLedger()
        self._streams: dict[str, DeltaStream] = {}
        self._prefill_listeners: list[Callable[[PrefillTrace], None]] = []
        self._aborting: set[str] = set()
        """Requests whose reader left before the engine reported their end."""
        self.stats = messages.EngineStats()
        """The latest statistics from the engine, at most about half a second old."""
        self.alive = False
        """True if the engine is ready; false from its death until a restart is ready."""
        self.requests_requeued = 0
        """Requests resubmitted to a new epoch because the previous one died; only grows."""
        self.rank_failures = {str(rank): 0 for rank in range(1, config.num_ranks)}
        """Deaths of the engine by the rank at fault, for the ranks in processes other than the engine's own."""
        self.start_failures = 0
        """Restarts of an engine that failed; only grows."""
        self.permanently_failed = False
        """True if the engine died and will not be restarted."""
        self.restarts = False
        """True if the engine died and another one will resume its requests."""
        self._failure_reason = "the engine is not running"
        self._changes: dict[int, tuple[messages.ControlOrder, asyncio.Future[None]]] = {}
        """Orders that the engine has not acknowledged, by ticket."""
        self._tickets = itertools.count()
        self._report: asyncio.Future[None] | None = None
        """Completes with the report that was queried; None if none is pending."""
        self._activities: Mapping[str, RequestActivity] = {}
        """The last report, and its time."""
        self._reported_at = -math.inf
        self._weights: messages.UpdateWeights | None = None
        """The last update, which a restarted engine receives first; None before any."""
        self._paused = False
        """True if a restarted engine has to be paused."""
        self._sleep_level = 0
        """Level at which a restarted engine has to sleep; 0 for none."""

    @property
    def active_requests(self) -> int:
        """Requests that have not ended, including requests that are being aborted."""
        return len(self._streams) + len(self._aborting)

    @property
    def computes(self) -> bool:
        """True if the engine has requests that it may compute: then it must not be silent."""
        return self.active_requests > 0 and not self.info.stopped

    @property
    def engines(self) -> Sequence[SingleEngineClient]:
        """This client alone."""
        return (self,)

    @property
    def healthy(self) -> bool:
        """True if the engine is ready."""
        return self.alive

    @property
    def missing(self) -> str:
        """Message if the engine is not ready; empty if it is."""
        return "" if self.alive else "the engine is not running"

    def runs(self, request_id: str) -> bool:
        """Return True if a request with this id has not ended."""
        return request_id in self._streams or request_id in self._aborting

    def listen_for_prefills(self, listener: Callable[[PrefillTrace], None]) -> None:
        """Call `listener` with each finished traced job of a decode worker; for a prefill worker."""
        self._prefill_listeners.append(listener)

    def submit(self, spec: RequestSpec, on_news: Callable[[Delta | None], None] | None = None) -> DeltaStream:
        """Start a request and return its deltas; the last one has a finish reason.

        `on_news` is called with each delta once it arrives, read or not, and with None if none is the last one. The
        request starts at once, not at the first `anext`. Closing the iterator before its end (`aclose`) aborts
        the request. Unread deltas accumulate; slow readers do not block other requests. Raises `BadRequest` if
        a request with this id runs already and `EngineDead` if there is no engine. If the engine dies later, the
        iterator pauses until another engine has resumed the request; it ends with finish reason `error` if engines keep
        dying with this request (see `fd_core.engine.clients.request_ledger`) and raises `EngineDead` if none can be
        started.
        """
        if not self.alive:
            raise EngineDead(self._failure_reason)
        request_id = spec.request_id
        if request_id in self._streams or request_id in self._aborting:
            raise BadRequest(f"a request with id {request_id!r} is already running", field="request_id")
        stream = DeltaStream(self, request_id, on_news)
        self._ledger.begin(spec)
        self._streams[request_id] = stream
        self._send(messages.Submit(spec))
        return stream

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Abort requests and return those that had not ended. Raises `EngineDead` if no engine will follow."""
        if not self.alive and not self.restarts:
            raise EngineDead(self._failure_reason)
        known = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self._ledger]
        asked = []
        for request_id in known:
            if self.alive and request_id not in self._ledger.held_suspects:
                asked.append(request_id)
            else:  # no engine has the request, so it ends here
                end = self._ledger.deliver(Delta(request_id, finish_reason=FinishReason.ABORT))
                if end is not None:
                    self._streams.pop(request_id).push(end)
        if asked:
            self._ledger.aborting(asked)
            self._send(messages.Abort(tuple(asked)))
        return known

    def abort_all(self) -> list[str]:
        """Abort everything and return the ids."""
        return self.abort(list(self._ledger))

    async def requests(self) -> list[ActiveRequest]:
        """Return the requests that have not ended, oldest first."""
        if self.alive and time.perf_counter() - self._reported_at >= _REPORT_INTERVAL:
            if self._report is None:
                self._send(messages.QueryActivities())
                self._report = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._report), _REPORT_SECONDS)
        activities = self._activities
        return [
            ActiveRequest(name, prompt, generated, self._streams[name].submitted, activities.get(name))
            for name, prompt, generated in self._ledger.lengths()
        ]

    def _reported(self, activities: Mapping[str, RequestActivity]) -> None:
        self._activities, self._reported_at = activities, time.perf_counter()
        report, self._report = self._report, None
        if report is not None:
            report.set_result(None)

    async def change_adapters(self, name: str, path: str | None) -> None:
        """Load the LoRA adapter in a folder, or unload it. Raises `BadRequest`, and then nothing has changed."""
        await self.control(messages.ChangeAdapters(name, path))

    async def control(self, order: messages.ControlOrder) -> None:
        """Return once the engine has carried out an order. Raises `BadRequest`, and then nothing has changed."""
        if not self.alive:
            raise EngineDead(self._failure_reason)
        ticket = next(self._tickets)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes[ticket] = order, done
        self._send(messages.Control(ticket, order))
        await done

    @abc.abstractmethod
    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for up to `drain_seconds`, abort the rest and stop the engine."""

    @abc.abstractmethod
    def _send(self, message: messages.ClientMessage) -> None:
        """Send a message to the engine without blocking."""

    def _controlled(self, answer: messages.Controlled) -> None:
        self.info = answer.info
        modules = tuple(f"{each.name}={each.path}" for each in answer.info.adapters)
        self._config = msgspec.structs.replace(self._config, lora_modules=modules)
        if answer.ticket == _STATE:
            if answer.error is not None:
                self._retire(f"the restarted engine cannot continue with the current weights: {answer.error}")
            return
        order, waiting = self._changes.pop(answer.ticket)
        if answer.error is None:
            match order:
                case messages.UpdateWeights():
                    self._weights = msgspec.structs.replace(order, version=answer.info.weight_version)
                case messages.PauseGeneration() | messages.ResumeGeneration():
                    self._paused = answer.info.paused
                case messages.Sleep() | messages.WakeUp():
                    self._sleep_level = answer.info.sleep_level
        if waiting.done():
            return
        if answer.error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(BadRequest(answer.error, field=answer.field))

    def _engine_ready(self, info: messages.EngineInfo) -> None:
        """Resume the requests of the previous epoch, now that an engine is ready; a paused one stays paused."""
        self.info = info
        orders: list[messages.ControlOrder] = [] if self._weights is None else [self._weights]
        orders += [messages.PauseGeneration()] if self._paused else []
        orders += [messages.Sleep(self._sleep_level)] if self._sleep_level else []
        for order in orders:
            self._send(messages.Control(_STATE, order))
        self.stats = messages.EngineStats(scheduler=SchedulerStats(blocks=BlockStats(total=info.num_kv_blocks)))
        self.alive, self.restarts = True, False
        if info.kv_events and self.kv_log is None:
            self.kv_log = KVEventLog(info.block_size)
        left_over = self._ledger.resubmissions()
        self.requests_requeued += len(left_over)
        for spec in left_over:
            self._send(messages.Submit(spec))

    def _engine_lost(self, reason: str, rank: str | None = None) -> None:
        """Suspend requests until another engine is ready; `rank` is the one at fault, as in `EngineDead.field`."""
        if rank is not None and (number := rank.removeprefix("rank ")) in self.rank_failures:
            self.rank_failures[number] += 1
        self._lost(reason, restarts=True)
        for end in self._ledger.died(reason):
            self._streams.pop(end.request_id).push(end)

    async def _start_replacement(self, start: Callable[[], Awaitable[None]]) -> str | None:
        """Start a replacement of the dead engine, with retries; return the reason if there will be none."""
        failures = 0
        while True:
            try:
                await start()
            except FdError as error:
                failures += 1
                self.start_failures += 1
                if failures == self._config.restart_attempts:  # 0: no limit
                    _log.error("the engine failed to restart: %s", error)
                    return f"the engine failed to restart {failures} times; restart the server"
                pause = pause_after(failures)
                _log.error("the engine failed to restart; next attempt in %g s: %s", pause, error)
                if failures == _MAX_FAILED_STARTS:
                    self._fail_all(f"the engine failed to restart {failures} times; the server keeps trying")
                await asyncio.sleep(pause)
            else:
                return None

    def _retire(self, reason: str) -> None:
        """Fail all requests permanently: no further engine will be started."""
        self._fail_all(reason)
        self.permanently_failed = True

    def _fail_all(self, reason: str) -> None:
        """Fail all requests, since the engine is down, temporarily or permanently."""
        self._lost(reason, restarts=False)
        streams, self._streams = self._streams, {}
        self._ledger = RequestLedger()
        for stream in streams.values():
            stream.fail(reason)

    def _lost(self, reason: str, *, restarts: bool) -> None:
        self.alive, self.restarts, self._failure_reason = False, restarts, reason
        for _, waiting in self._changes.values():
            if not waiting.done():
                waiting.set_exception(EngineDead(reason))
        self._changes.clear()
        self._reported({})
        if self.kv_log is not None:
            self.kv_log.restart(self.kv_index)
        self._aborting.clear()

    def _dispatch(self, events: messages.StepEvents) -> None:
        if not self.alive or events.epoch != self.info.epoch:
            return  # from an ended epoch: its successor delivers the same tokens
        if events.stats is not None:
            self.stats = events.stats
        if events.kv and self.kv_log is not None:
            self.kv_log.extend(events.kv, self.kv_index)
        for trace in events.prefills:
            for listener in self._prefill_listeners:
                listener(trace)
        if events.admitted:
            self._ledger.admitted(events.admitted)
            for request_id in events.admitted:
                stream = self._streams.get(request_id)
                if stream is not None and stream.admitted is None:
                    stream.admitted = time.perf_counter()
        for delta in events.deltas:
            ended = delta.finish_reason is not None
            if ended:
                self._aborting.discard(delta.request_id)
            if (seen := self._ledger.deliver(delta)) is not None:
                stream = self._streams.pop(delta.request_id) if ended else self._streams[delta.request_id]
                stream.push(seen)
        if self._ledger.held_suspects and (suspect := self._ledger.next_suspect()) is not None:
            self._send(messages.Submit(suspect))

    def _drop_request(self, request_id: str) -> None:
        known = self.alive and request_id not in self._ledger.held_suspects
        self._ledger.drop(request_id)
        if self._streams.pop(request_id, None) is not None and known:
            self._aborting.add(request_id)
            self._send(messages.Abort((request_id,)))


def _merged(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    scores = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Delta(
        last.request_id,
        tuple(token for delta in deltas for token in delta.token_ids),
        last.finish_reason,
        logprobs=tuple(score for group in scores for score in group) if scores else None,
        cached_tokens=next((delta.cached_tokens for delta in deltas if delta.cached_tokens is not None), None),
        error=last.error,
        prefill=next((delta.prefill for delta in deltas if delta.prefill is not None), None),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        pooled=next((delta.pooled for delta in deltas if delta.pooled is not None), None),
        phases=next((delta.phases for delta in reversed(deltas) if delta.phases is not None), None),
    )
