"""Health checks of the workers and the KV events that they report; the router gets both. No counter changes here.

One task follows the KV events of one incarnation by long polls: each requests the events that follow the last one.
After any error, the router uses the prefixes that the worker served, and the task starts over with all blocks
that the worker holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from fd_core.disagg.ticket import KV_PORT_HEADER, ROLE_HEADER
from fd_core.http.draining import DRAINING_HEADER
from fd_core.http.errors import ApiError, HealthAnswer, unavailable
from fd_core.router.attempts import Unreached
from fd_core.router.gateway.http1.workers import UPSTREAM_ERRORS, is_resource_exhaustion
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.workers import ROLES, Member, RouterWorker, WorkerState
from fd_core.server.api.admin import KV_EVENTS_PATH, OFFER_HEADER, WAIT_SECONDS
from fd_core.types.kv_events import KVPage

_STANDSTILL_SECONDS: Final = 1.0
"""A check delayed by more than this is attributed to this process, not to the worker."""
_MODELS_SECONDS: Final = 60.0
"""Interval between queries for the models of a worker: adapters may be loaded and unloaded."""
_TASK: Final = "health_checks"

log = logging.getLogger(__name__)
_MAX_EVENT_BYTES: Final = 256 << 20
"""Limit of one answer, which may name all blocks that a worker holds, as token ids."""
_EVENTS_SECONDS: Final = WAIT_SECONDS + 20.0
_EVENT_BATCH_SECONDS: Final = 0.02
"""Events within this time are fetched together."""
_PAUSES: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Backoff in seconds before each attempt; the last value applies to all further attempts."""

_MAX_HEALTH_BYTES: Final = 4096
_MAX_REASON: Final = 300
_health: Final = msgspec.json.Decoder(HealthAnswer)
_pages: Final = msgspec.msgpack.Decoder(KVPage)


class HealthChecks:
    """Checks every worker at the router's interval; a worker that hangs does not delay the checks of others."""

    def __init__(self, state: GatewayState, on_offer: Callable[[RouterWorker], None]) -> None:
        """`on_offer` is called with each healthy worker that offers KV events."""
        self._state = state
        self._router = state.router
        self._on_offer = on_offer
        self._asked: dict[RouterWorker, float] = {}
        """Time of the last request for the models of each worker."""
        self._running: dict[RouterWorker, asyncio.Task[None]] = {}
        self._unreached = Unreached(state.config.unreachable_seconds)
        self._complaints: dict[str, str] = {}
        """Reason why a worker is unfit for its role, as logged, by address."""
        self._lacks = False
        """True if the last check failed for lack of resources on this machine."""
        self._wake = asyncio.Event()
        self._round = -math.inf
        """Start of the last round of checks."""

    def wake(self) -> None:
        """Check workers at once that were never checked: one has registered, or one has deregistered."""
        self._wake.set()

    async def run(self) -> None:
        """Check until cancelled."""
        interval = self._router.config.health_check_interval_secs
        try:
            while True:
                self._wake.clear()
                now = time.monotonic()
                due = now - self._round >= interval
                if due:
                    if now - self._round > interval + _STANDSTILL_SECONDS:
                        self._unreached.forget()  # this process was suspended, not the workers
                    self._round = now
                self._begin(due)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._round + interval - now):
                        await self._wake.wait()
        finally:
            for task in [*self._running.values()]:
                task.cancel()

    def _begin(self, due: bool) -> None:
        for worker in [worker for worker, task in self._running.items() if task.done()]:
            del self._running[worker]
        workers = self._router.workers()
        urls = {worker.url for worker in workers}
        self._unreached.keep(urls)
        for url in self._complaints.keys() - urls:
            del self._complaints[url]
        self._state.supervisor.keep(_TASK, urls)
        for worker in self._asked.keys() - set(workers):
            del self._asked[worker]
        for worker in workers:
            if worker not in self._running and (
                due or _state(self._router.registry.member(worker)) is WorkerState.UNKNOWN
            ):
                self._running[worker] = self._state.supervisor.start(
                    _TASK, partial(self._check_or_fail, worker), part=worker.url, repeat=False
                )

    async def _check_or_fail(self, worker: RouterWorker) -> None:
        try:
            await self._check(worker)
        except Exception as error:
            failure = f"the check itself failed ({type(error).__name__})"
            self._router.health(worker, False, time.monotonic(), failure=failure)
            raise

    async def _check(self, worker: RouterWorker) -> None:
        ok, reached, begun = False, False, time.monotonic()
        instance, role, port, leaving = None, None, None, False
        offers, why = False, ""
        before = _state(self._router.registry.member(worker))
        try:
            settings = self._router.config
            async with (
                asyncio.timeout(settings.health_check_timeout_secs),
                await self._state.client.request("GET", worker.url, settings.health_check_endpoint, {}) as answer,
            ):
                reached, ok = True, answer.status == 200
                why = f"HTTP status {answer.status}"
                instance = answer.headers.get("X-Instance", "")[:128] or None
                leaving = DRAINING_HEADER in answer.headers
                offers = ok and OFFER_HEADER in answer.headers
                role = answer.headers.get(ROLE_HEADER)
                role = role if role is None or role in ROLES else "strange"
                port = _port(answer.headers.get(KV_PORT_HEADER, ""))
                if not ok:
                    why += _reason_in(await answer.read_up_to(_MAX_HEALTH_BYTES))
        except (UPSTREAM_ERRORS, ValueError) as error:
            why = why or self._reason_of(error)
            if is_resource_exhaustion(error):
                if not self._lacks:
                    log.warning("cannot open connections for health checks (%s): worker states are unchanged", error)
                self._lacks = True
                return
        self._lacks = False
        now = time.monotonic()
        if not reached and now - begun > self._router.config.health_check_timeout_secs + _STANDSTILL_SECONDS:
            self._unreached.reached(worker.url)
            return  # a check that exceeds its own limit shows that this process was suspended
        after = self._router.health(worker, ok, now, instance=instance, role=role, kv_port=port, failure=why)
        member = self._router.registry.member(after)
        state = _state(member)
        if ok and leaving and member is not None and not member.leaving:
            self._router.leaving(after)
            log.info("worker %s is shutting down", after.url)
        if offers:
            self._on_offer(after)
        if state is not before or after != worker:
            suffix = "" if after == worker else ", as a new process"
            log.info("worker %s is %s%s%s", after.url, state.value, suffix, "" if ok else f": {why}")
        self._complain(after, "" if member is None else member.unfit)
        if reached:
            # A worker that responds at all, even as unhealthy, may still finish its running requests.
            self._unreached.reached(worker.url)
            if ok and now - self._asked.get(after, -math.inf) >= _MODELS_SECONDS:
                self._asked[after] = now
                models = await served(self._state, after)
                if models is not None:
                    self._router.serves(after, *models)
            return
        if state is WorkerState.UNHEALTHY:
            # Requests without a first byte are retried elsewhere.
            self._state.client.expire_first_bytes(worker.url)
        if self._unreached.missed(worker.url, begun, now):
            patience = self._state.config.unreachable_seconds
            if cut := self._state.client.expire_streams(worker.url, patience):
                message = "worker %s unreachable by health checks for %g s: ended %d running answers"
                log.warning(message, worker.url, patience, cut)

    def _reason_of(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._router.config.health_check_timeout_secs:g} s"
        named = error.strerror if isinstance(error, OSError) else None
        return named or str(error) or type(error).__name__

    def _complain(self, worker: RouterWorker, unfit: str) -> None:
        """Log once that a healthy worker cannot be used, and forget it when the worker can."""
        if unfit == self._complaints.get(worker.url, ""):
            return
        if unfit:
            self._complaints[worker.url] = unfit
            log.warning("worker %s gets no requests: %s", worker.url, unfit)
        else:
            del self._complaints[worker.url]


def _reason_in(body: bytes) -> str:
    """Return the reason that an unhealthy worker gives, as one line after a colon; empty without one."""
    try:
        reason = _health.decode(body).reason
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return f": {' '.join(reason.split())[:_MAX_REASON]}" if reason else ""


def _state(member: Member | None) -> WorkerState:
    return WorkerState.GONE if member is None else member.state


def _port(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536 else None


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]] | None = None
    models: list[dict[str, Any]] | None = None
    """Of Ollama's API."""


MODELS_PATH: Final = "/v1/models"
_models: Final = msgspec.json.Decoder(_ModelList)


async def union(state: GatewayState, headers: Mapping[str, str], path: str = MODELS_PATH) -> list[dict[str, Any]]:
    """Return each model that healthy workers list, once; `ApiError` if none responds, or one rejects the key."""
    workers = [w.worker for w in state.router.snapshot().workers if w.state is WorkerState.HEALTHY]
    if not workers:
        raise unavailable("no worker is healthy", "none_healthy", retry_after=1)
    found = await asyncio.gather(*(_of(state, worker, headers, path) for worker in workers))
    lists = [each for each in found if not isinstance(each, ApiError)]
    if not lists:
        raise next(each for each in found if isinstance(each, ApiError))
    models: dict[str, dict[str, Any]] = {}
    for each in lists:
        for model in each:
            models.setdefault(str(model.get("id") or model.get("name")), model)
    return list(models.values())


async def first_root(state: GatewayState) -> str | None:
    """Return the name under which a worker loaded its first model; None if no worker answers."""
    try:
        models = await union(state, state.own_headers)
    except ApiError:
        return None
    root = models[0].get("root") or models[0].get("id") if models else None
    return root if isinstance(root, str) else None


async def served(state: GatewayState, worker: RouterWorker) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the names of the models of one worker, and those that are adapters; None if it does not answer."""
    found = await _of(state, worker, state.own_headers)
    if isinstance(found, ApiError):
        return None
    lengths = [most for model in found if type(most := model.get("max_model_len")) is int]
    state.costs.context = max([*lengths, *filter(None, [state.costs.context])], default=None)
    named = [(name, model.get("parent")) for model in found if isinstance(name := model.get("id"), str)]
    return frozenset(name for name, _ in named), frozenset(name for name, parent in named if parent)


async def _of(
    state: GatewayState, worker: RouterWorker, headers: Mapping[str, str], path: str = MODELS_PATH
) -> list[dict[str, Any]] | ApiError:
    try:
        async with asyncio.timeout(5.0), await state.client.request("GET", worker.url, path, headers) as answer:
            if answer.status in (401, 403):
                return ApiError(answer.status, "the workers do not accept this API key", code="invalid_api_key")
            if answer.status == 200:
                listed = _models.decode(await answer.read_up_to(1 << 20))
                if (found := listed.data if listed.models is None else listed.models) is not None:
                    return found
    except (UPSTREAM_ERRORS, msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return unavailable("no worker reported its models", "none_healthy", retry_after=1)


class _Broken(ValueError):
    """The worker's events cannot be used; the text of the exception is readable and quotes none of them."""


class _Follower:
    def __init__(self, state: GatewayState, worker: RouterWorker, report: Callable[[RouterWorker, str], None]) -> None:
        self._state = state
        self._router = state.router
        self._worker = worker
        self._report = report
        self._failures = 0

    async def run(self, fingerprint: str) -> None:
        """Follow until the incarnation is lost. `fingerprint` is that of the gateway's prompt reader."""
        worker = self._worker
        while worker in self._router.workers():
            await asyncio.sleep(_PAUSES[min(self._failures, len(_PAUSES) - 1)])
            self._failures += 1
            try:
                await self._listen(fingerprint)
            except UPSTREAM_ERRORS as error:
                if self._failures > 1:  # a single failure is not reported: the worker may have just started
                    self._report(worker, f"no response ({type(error).__name__})")
            except ValueError as error:
                self._report(worker, str(error))
            finally:
                self._router.reported_kv.end(worker)

    async def _listen(self, fingerprint: str) -> None:
        """Fetch the worker's blocks, then its events while they count. Raises `ValueError` or `UPSTREAM_ERRORS`."""
        page = await self._ask(None)
        if page.reading != fingerprint:
            raise _Broken("its tokenizer or chat template differs from that of --tokenizer")
        reported, instance = self._router.reported_kv, page.instance
        if not reported.begin(self._worker, page.block_size, instance, page.engines):
            return
        while True:
            if page.instance != instance:
                raise _Broken("another process now has its address")
            for event in page.events:
                if not reported.apply(self._worker, event):
                    return
                await asyncio.sleep(0)  # requests have priority
            self._failures = 0
            self._report(self._worker, "")
            await asyncio.sleep(_EVENT_BATCH_SECONDS)
            page = await self._ask(page)

    async def _ask(self, last: KVPage | None) -> KVPage:
        """Wait for the events that follow the page `last` and return them; all blocks of the worker if it is None."""
        asked = {} if last is None else {"after": str(last.next), "instance": last.instance}
        headers = {"Authorization": f"Bearer {self._state.config.router_secret}"}
        target = f"{KV_EVENTS_PATH}?{urlencode(asked)}" if asked else KV_EVENTS_PATH
        async with (
            asyncio.timeout(_EVENTS_SECONDS),
            await self._state.client.request("GET", self._worker.url, target, headers) as answer,
        ):
            if answer.status == 403:
                raise _Broken("it rejects the secret of --router-secret-file")
            if answer.status != 200:
                raise _Broken(f"HTTP status {answer.status}")
            data = await answer.read_up_to(_MAX_EVENT_BYTES + 1)
        if len(data) > _MAX_EVENT_BYTES:
            raise _Broken(f"a response exceeds {_MAX_EVENT_BYTES >> 20} MiB")
        try:
            return _pages.decode(data)
        except msgspec.MsgspecError:
            raise _Broken("its events cannot be decoded") from None  # the error may quote it


class KVFollowers:
    """Follows the KV events of every incarnation that offers them, until the incarnation is lost."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._following: set[RouterWorker] = set()
        self._logged: dict[str, str] = {}
        """The failure that was logged last, by address."""

    def offered(self, worker: RouterWorker) -> None:
        """Follow a healthy worker that offers KV events, if the policy can use them."""
        state, fingerprint = self._state, self._state.reader.fingerprint
        if worker in self._following or fingerprint is None or not state.config.router_secret:
            return
        if not state.router.uses_prefix(worker):
            return
        follower = _Follower(state, worker, self._log_events_error)
        self._following.add(worker)
        task = state.supervisor.start("kv_events", partial(follower.run, fingerprint), part=worker.url)
        task.add_done_callback(lambda _: self._following.discard(worker))

    def _log_events_error(self, worker: RouterWorker, error_text: str) -> None:
        if error_text == self._logged.get(worker.url, ""):
            return
        if error_text:
            message = "KV events of worker %s cannot be used; falling back to the prefixes that it served: %s"
            log.warning(message, worker.url, error_text)
        else:
            log.info("KV events of worker %s can be used", worker.url)
        self._logged[worker.url] = error_text
