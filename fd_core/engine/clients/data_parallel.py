"""Several engines of one model on this machine, as one: each request goes to the engine that will start it soonest.

Each engine has separate processors or devices, ranks, slots, KV and restarts. Requests are placed by the router's load
accounting and its policy `cache_aware`, in this process: by the prefixes that engines served, or with `--kv-events` by
those that they hold, and by their remaining work. Texts do not depend on the engine that computes them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from fd_core.backends.device_assignment import DeviceAssignment
from fd_core.config import EngineConfig
from fd_core.engine.clients.client import ActiveRequest, DeltaStream, EngineControls, SingleEngineClient, StartProgress
from fd_core.engine.clients.process import ProcessClient
from fd_core.engine.process.messages import ControlOrder, EngineInfo, EngineStats
from fd_core.errors import BadRequest, ConfigError, EngineDead, FdError
from fd_core.kv.event_log import KVEventLog
from fd_core.plugins import ROUTER_POLICY, installed_plugins
from fd_core.router.config import RouterConfig
from fd_core.router.router import Router
from fd_core.router.selection import RouteRequest, Selection
from fd_core.scheduling.contract import SchedulerStats
from fd_core.types import Delta, PrefillTrace, RequestSpec
from fd_core.types.metrics import total

_FLAG = "--data-parallel-size"


async def open_engines(
    config: EngineConfig, path: Path | None, progress: StartProgress, count: int
) -> DataParallelClient:
    """Start `count` engines at once. Raises the errors of loading, and `ConfigError` for settings of one engine."""
    _require_separable(config)
    chosen = await asyncio.to_thread(installed_plugins().choose_backend, config.backend)
    assignments = chosen.cls.device_assignments(count, config.tensor_parallel_size)
    config = msgspec.structs.replace(config, backend=chosen.name)  # so that not every engine probes all backends
    opening = [
        ProcessClient.open(_share(config, assignment, count), path, report, assignment)
        for assignment, report in zip(assignments, _joined_progress(progress, count), strict=True)
    ]
    opened = await asyncio.gather(*opening, return_exceptions=True)
    engines = [each for each in opened if isinstance(each, ProcessClient)]
    failures = [each for each in opened if isinstance(each, BaseException)]
    if failures:
        await asyncio.gather(*(engine.close() for engine in engines))
        raise failures[0]
    return DataParallelClient(engines, prefixes=config.enable_prefix_caching, reason=chosen.reason)


class DataParallelClient(EngineControls):
    """Several engines as one. A dead engine is restarted; the others continue meanwhile."""

    def __init__(self, engines: Sequence[SingleEngineClient], *, prefixes: bool = True, reason: str = "") -> None:
        """`prefixes`: True if engines cache prefixes of prompts; `reason`: why their backend was chosen."""
        self._reason = reason
        self.engines = tuple(engines)
        info = self.engines[0].info
        placing = RouterConfig(
            policy="cache_aware" if prefixes else "request_num",
            cache_block_size=info.block_size,
            # An engine may report a path in addition to its blocks, for the one block of it that it holds.
            max_index_blocks=max(each.info.num_kv_blocks for each in self.engines)
            + info.max_model_len // info.block_size,
            balance_abs_threshold=info.max_num_seqs / 2,  # requests do not queue long while others have free slots
        )
        self._router = Router(placing, partial(installed_plugins().load, ROUTER_POLICY))
        now = time.monotonic()
        # A router identifies workers by address: these stand for engines, and no client connects to them.
        self._workers = [
            self._router.register(f"http://{index}", "mixed", now, instance=str(index))
            for index in range(len(self.engines))
        ]
        self.kv_log: KVEventLog | None = None
        self._events_read: int | None = None
        """Number of the first event not yet forwarded to the router."""
        if info.kv_events:
            self.kv_log = KVEventLog(info.block_size, len(self.engines))
            for index, engine in enumerate(self.engines):
                engine.kv_log, engine.kv_index = self.kv_log, index
                self._router.reported_kv.begin(self._workers[index], info.block_size, str(index))
        self._epochs = [engine.info.epoch for engine in self.engines]
        self._changing = asyncio.Lock()

    @property
    def info(self) -> EngineInfo:
        """Properties of each engine, with the slots and the memory of all; `epoch` counts the starts of all."""
        infos = [engine.info for engine in self.engines]
        return msgspec.structs.replace(
            infos[0],
            backend_reason=self._reason or infos[0].backend_reason,
            max_model_len=min(info.max_model_len for info in infos),
            max_num_seqs=sum(info.max_num_seqs for info in infos),
            num_kv_blocks=sum(info.num_kv_blocks for info in infos),
            kv_cache_bytes=sum(info.kv_cache_bytes for info in infos),
            host_kv_bytes=sum(info.host_kv_bytes for info in infos),
            kv_store_answers=all(info.kv_store_answers for info in infos),
            epoch=1 + sum(info.epoch - 1 for info in infos),
        )

    @property
    def stats(self) -> EngineStats:
        """Scheduler statistics, summed; other statistics stay with each engine."""
        parts = [engine.stats.scheduler for engine in self.engines]
        summed = ("slots", "counters", "blocks", "outputs", "drafts", "offload")
        sums = {name: total([getattr(part, name) for part in parts]) for name in summed}
        return EngineStats(scheduler=SchedulerStats(**sums))

    @property
    def alive(self) -> bool:
        """True if at least one engine is ready."""
        return any(engine.alive for engine in self.engines)

    @property
    def restarts(self) -> bool:
        """True if an engine died and another one will resume its requests."""
        return any(engine.restarts for engine in self.engines)

    @property
    def healthy(self) -> bool:
        """True if an engine is ready and none is down permanently."""
        return self.alive and all(engine.alive or engine.restarts for engine in self.engines)

    @property
    def missing(self) -> str:
        """Message that names the engines that are not ready; empty if all are."""
        missing = [f"engine {index}" for index, engine in enumerate(self.engines) if not engine.alive]
        verb = "is" if len(missing) == 1 else "are"
        return f"{' and '.join(missing)} of {len(self.engines)} {verb} not running" if missing else ""

    @property
    def active_requests(self) -> int:
        """Requests that have not ended, including requests that are being aborted."""
        return sum(engine.active_requests for engine in self.engines)

    @property
    def requests_requeued(self) -> int:
        """Requests resubmitted to a new epoch of their engine; only grows."""
        return sum(engine.requests_requeued for engine in self.engines)

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for up to `drain_seconds`, abort the rest and stop every engine."""
        await asyncio.gather(*(engine.close(drain_seconds) for engine in self.engines))

    def submit(self, spec: RequestSpec) -> DeltaStream:
        """Start a request on the engine that the policy chooses; otherwise as `SingleEngineClient.submit`."""
        if any(engine.runs(spec.request_id) for engine in self.engines):
            raise BadRequest(f"a request with id {spec.request_id!r} is already running", field="request_id")
        now = time.monotonic()
        self._sync_router(now)
        # Prompts of another adapter or salt share no KV.
        salt = f"{spec.adapter}/{spec.cache_salt}" if spec.adapter or spec.cache_salt else ""
        asked = RouteRequest(np.array(spec.prompt, np.int32), salt=salt)
        chosen = self._router.select(asked, now, random.random())  # noqa: S311 - spreads load, hides nothing
        if not isinstance(chosen, Selection):
            raise EngineDead(self.missing)
        try:
            engine = self.engines[self._workers.index(chosen.prefill)]
            return engine.submit(spec, partial(self._account, chosen))
        except BaseException:
            chosen.release()
            raise

    def listen_for_prefills(self, listener: Callable[[PrefillTrace], None]) -> None:
        """Do nothing: there are no prefill workers among several engines."""

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Abort the named requests, wherever they are. Raises `EngineDead` if no engine is left."""
        return [request_id for engine in self._recoverable() for request_id in engine.abort(request_ids)]

    def abort_all(self) -> list[str]:
        """Abort everything and return the ids."""
        return [request_id for engine in self._recoverable() for request_id in engine.abort_all()]

    def _recoverable(self) -> list[SingleEngineClient]:
        if there := [engine for engine in self.engines if engine.alive or engine.restarts]:
            return there
        raise EngineDead(self.missing)

    async def requests(self) -> list[ActiveRequest]:
        """Return the requests that have not ended, oldest first."""
        parts = await asyncio.gather(*(engine.requests() for engine in self.engines))
        return sorted((each for part in parts for each in part), key=lambda each: each.submitted)

    async def change_adapters(self, name: str, path: str | None) -> None:
        """Load an adapter into all engines, or unload it. Raises `BadRequest` or `EngineDead` after a rollback."""
        async with self._changing:
            self._require_all()
            known = {info.name: info.path for info in self.info.adapters}
            changes = [engine.change_adapters(name, path) for engine in self.engines]
            results = await asyncio.gather(*changes, return_exceptions=True)
            failures = [result for result in results if result is not None]
            if not failures:
                return
            undone = [
                engine.change_adapters(name, known.get(name))
                for engine, result in zip(self.engines, results, strict=True)
                if result is None
            ]
            await asyncio.gather(*undone, return_exceptions=True)  # a dead engine restarts without the change
            raise failures[0]

    async def control(self, order: ControlOrder) -> None:
        """Give an order to every engine. Raises the first error of an engine, which names those that carried it out."""
        async with self._changing:
            self._require_all()
            results = await asyncio.gather(*(each.control(order) for each in self.engines), return_exceptions=True)
            done = ", ".join(str(index) for index, failure in enumerate(results) if failure is None)
            for index, failure in enumerate(results):
                if done and isinstance(failure, FdError):
                    failure.message += f"; engine {index} failed, but {done} carried it out: repeat the request"
                if failure is not None:
                    raise failure

    def _require_all(self) -> None:
        if self.missing:
            raise EngineDead(self.missing)

    def _sync_router(self, now: float) -> None:
        """Update the router: which engines are ready, which ones restarted, and the prefixes that they hold."""
        for index, engine in enumerate(self.engines):
            self._workers[index] = self._router.health(self._workers[index], engine.alive, now, instance=str(index))
            if engine.info.epoch != self._epochs[index]:
                self._epochs[index] = engine.info.epoch
                self._router.emptied(self._workers[index])
        if self.kv_log is not None:
            self._events_read, events = self.kv_log.read(self._events_read)
            for event in events:
                of_one = msgspec.structs.replace(event, engine=0)  # each engine is a separate worker here
                self._router.reported_kv.apply(self._workers[event.engine], of_one)

    def _account(self, selection: Selection, delta: Delta | None) -> None:
        """Account for a delta of a request, and release its load once it has ended."""
        if selection.released:
            return  # its reader left
        if delta is not None and (delta.token_ids or delta.pooled is not None):
            selection.first_token()
        if delta is None or delta.finish_reason is not None:
            if selection.started:
                self._router.served(selection, time.monotonic())
            selection.release()


def _require_separable(config: EngineConfig) -> None:
    refused = (
        ("--role", config.role != "mixed", f"a {config.role} worker has one engine"),
        ("--trace", config.trace is not None, "a trace records one engine"),
        (
            "--pipeline-parallel-size",
            config.pipeline_parallel_size > 1,
            "stages have no separate devices there yet",
        ),
    )
    for flag, given, reason in refused:
        if given:
            raise ConfigError(
                f"{flag} cannot be combined with several engines: {reason}",
                field=_FLAG,
                hint=f"remove {flag} or {_FLAG}",
            )


def _share(config: EngineConfig, assignment: DeviceAssignment, count: int) -> EngineConfig:
    """Divide the memory that `count` engines share: the host's, and the KV cache if it is in host memory too."""
    kv = {}
    if assignment.cores:
        kv["gpu_memory_utilization"] = config.gpu_memory_utilization / count
        if config.kv_cache_memory is not None:
            kv["kv_cache_memory"] = config.kv_cache_memory // count
    return msgspec.structs.replace(config, host_kv_memory=config.host_kv_memory // count, **kv)


def _joined_progress(progress: StartProgress, count: int) -> Sequence[StartProgress]:
    """Return the progress callback of each engine, so that `progress` receives sums."""
    seen: list[dict[str, tuple[int, int]]] = [{} for _ in range(count)]

    def report(index: int, phase: str, done: int, size: int) -> None:
        seen[index][phase] = (done, size)
        # Assumes the same amount of work for engines that have not begun the phase.
        known = [each[phase] for each in seen if phase in each]
        progress(phase, sum(part for part, _ in known), size * (count - len(known)) + sum(whole for _, whole in known))

    return [partial(report, index) for index in range(count)]
