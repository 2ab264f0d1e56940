"""The engine: scheduler, runner and output side, joined into steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from fd_core.backends.contract import Backend
from fd_core.config import EngineConfig, resolve_limits
from fd_core.disagg.decode.receiver import Receiver
from fd_core.disagg.prefill.sender import Sender
from fd_core.disagg.stats import ReceiverStats, SenderStats
from fd_core.engine.client import StartProgress
from fd_core.engine.device import Device, make_device
from fd_core.engine.kv_offload import kv_identity, open_kv_storage, start_kv_offload
from fd_core.engine.kv_transfer import (
    open_kv_transfer,
    prefill_request,
    prefill_request_id,
    refusal,
    require_role,
)
from fd_core.engine.messages import EngineInfo, EngineStats, LeaseStats
from fd_core.engine.prefill_pace import PrefillPace
from fd_core.engine.probe import EngineProbe
from fd_core.errors import BadRequest
from fd_core.kv.effects import Effects, GiveUp, LeaseEnded, PrefillJobArrived, PrefillPaceMeasured
from fd_core.kv.events import KVEvent
from fd_core.kv.locked_kv_cache import LockedKVCache
from fd_core.kv.port import CompletionQueue, JoinedKVPort, KVPort, NullKVPort
from fd_core.kv.tiers.stats import TierStats
from fd_core.plugins import installed_plugins
from fd_core.runner.drafting import make_drafter
from fd_core.runner.runner import Runner
from fd_core.scheduling.drafts import DraftControl
from fd_core.scheduling.scheduler import Scheduler
from fd_core.tracing.format import TraceHeader
from fd_core.tracing.kv_operations import KVTrace
from fd_core.tracing.writer import TraceWriter, require_trace_file
from fd_core.types import Delta, FinishReason, PrefillJob, RequestSpec, StepPlan

__all__ = ["Engine", "load_engine"]

EngineKVPort = KVPort[tuple[TierStats | None, ReceiverStats | SenderStats | None]]
"""Storage and transfers of one engine behind one port."""


_KV_WAIT_SECONDS = 0.005
"""How long an engine whose requests all wait for KV outside the device sleeps before it looks at its messages."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Engine:
    """Runs requests to their ends, step by step. Used from one thread."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        device: Device,
        kv: EngineKVPort,
        *,
        watchdog_seconds: float,
        prefill_token: float,
        trace: TraceWriter | None = None,
    ) -> None:
        """`prefill_token`: seconds that a token of a prompt took before the first request."""
        self.info = info
        self._scheduler = scheduler
        self._device = device
        self._watchdog_seconds = watchdog_seconds
        self._kv = kv
        self._kv_trace = None if trace is None else KVTrace(trace)
        self._kv_events: list[KVEvent] = []
        self._prefill_pace = PrefillPace(prefill_token)
        scheduler.complete(PrefillPaceMeasured(prefill_token))
        self._stopping = False
        self._trace = trace
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        """Plans that were not answered, with when they were submitted."""
        self.on_admission: Callable[[tuple[str, ...]], None] = lambda _: None
        """Told which requests enter a slot, before a step computes them."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, now or once something in flight is answered."""
        return self._scheduler.has_work or bool(self._in_flight)

    def submit(self, spec: RequestSpec) -> list[Delta]:
        """Queue a request; one that can never run is answered with its last delta at once."""
        try:
            self._scheduler.add(spec)
        except BadRequest as error:
            return [Delta(spec.request_id, finish_reason=FinishReason.ERROR, error=str(error))]
        return []

    def abort(self, request_ids: Iterable[str]) -> list[Delta]:
        """Abort requests; returns the last deltas of those that ended at once. Idempotent."""
        deltas = (self._scheduler.abort(request_id) for request_id in request_ids)
        return [delta for delta in deltas if delta is not None]

    def abort_all(self) -> list[Delta]:
        """Abort everything."""
        return self.abort(self._scheduler.request_ids())

    def stop(self) -> None:
        """Take no more prefill jobs of decode workers; those that run go on."""
        self._stopping = True

    def step(self) -> list[Delta]:
        """Keep up to `pipeline_depth` plans in flight, then commit the oldest answer."""
        if self._trace is not None:
            self._trace.turn_began(time.monotonic_ns())
        while len(self._in_flight) < self.info.pipeline_depth:
            self._complete()
            plan, effects = self._scheduler.plan()
            self._perform(effects)
            if plan is None:
                if effects.operations:
                    continue  # some operations are over at once
                break
            if plan.admissions:
                self.on_admission(tuple(admission.request_id for admission in plan.admissions))
            self._device.submit(plan)
            self._in_flight.append((plan, time.monotonic()))
        if not self._in_flight:
            if self._scheduler.has_work:
                self._kv.wait(_KV_WAIT_SECONDS)
            return []
        output = self._device.collect(self._watchdog_seconds)
        plan, submitted = self._in_flight.popleft()
        if (pace := self._prefill_pace.observe(plan, submitted, time.monotonic())) is not None:
            self._scheduler.complete(pace)
        deltas, effects = self._scheduler.commit(plan, output)
        self._perform(effects)
        if self._trace is not None:
            self._trace.step_ended(time.monotonic_ns(), plan, output, deltas, self._scheduler.gauges())
        return deltas

    def stats(self) -> EngineStats:
        """Return gauges and counters as they are now."""
        kv, transfer = self._kv.stats()
        leases = None
        if transfer is not None:
            leases = LeaseStats(
                open=transfer.open_leases,
                receiver=transfer if isinstance(transfer, ReceiverStats) else None,
                sender=transfer if isinstance(transfer, SenderStats) else None,
            )
        return EngineStats(scheduler=self._scheduler.stats(), kv=kv, leases=leases)

    def take_kv_events(self) -> tuple[KVEvent, ...]:
        """Return which prefixes the device came to hold and lost since the last call; none unless asked to tell."""
        events = tuple(self._kv_events)
        self._kv_events.clear()
        return events

    def check_integrity(self) -> None:
        """Audit slots and blocks; raises `RuntimeError` if they contradict each other."""
        self._scheduler.check_integrity()

    def probe(self) -> EngineProbe:
        """Return the parts of this engine, for audits and tests."""
        return EngineProbe(self._scheduler, self._device, self._watchdog_seconds)

    def close(self) -> None:
        """Stop the engine's threads; what is in flight is computed and dropped, what waits for a store written."""
        self._kv.close()
        self._device.close()
        if self._trace is not None:
            self._trace.close(time.monotonic_ns())

    def _complete(self) -> None:
        """Tell the scheduler what became of operations outside steps, and take in what other workers ask for."""
        for completion in self._kv.completions():
            match completion:
                case PrefillJobArrived(job):
                    self._begin_job(job)
                case LeaseEnded(lease):
                    self._scheduler.abort(prefill_request_id(lease))
                case _:
                    if self._kv_trace is not None:
                        self._kv_trace.ended(completion)
                    self._scheduler.complete(completion)

    def _begin_job(self, job: PrefillJob) -> None:
        reason = "the prefill worker is shutting down" if self._stopping else refusal(job, self.info.vocab_size)
        if reason is None:
            try:
                self._scheduler.add(prefill_request(job))
            except BadRequest as error:
                reason = error.message
        if reason is not None:
            self._kv.perform([GiveUp(job.lease, reason, refused=True)])

    def _perform(self, effects: Effects) -> None:
        """Begin what the scheduler wants done outside steps."""
        self._kv_events.extend(effects.events)
        if self._kv_trace is not None:
            self._kv_trace.began(effects)
        self._kv.perform(effects.operations)


def load_engine(
    config: EngineConfig,
    path: Path | None,
    *,
    epoch: int = 1,
    progress: StartProgress,
    wake: Callable[[], None] = lambda: None,
) -> Engine:
    """Choose the backend, load the model at `path`, size the KV cache, warm up.

    `path` is None only for backends that need no checkpoint. `wake` is called, on any thread, when a step would do
    something that nobody submitted. Raises `ConfigError`, `ModelError` or `PluginError`.
    """
    if config.trace is not None:
        require_trace_file(Path(config.trace))
    require_role(config)
    plugins = installed_plugins()
    choice = plugins.choose_backend(config.backend)
    policy = plugins.scheduler_class(config.scheduling_policy)()
    victims = plugins.victim_policy_class(config.victim_policy)()
    plugins.connector_class(config.kv_connector)  # a name that no plugin offers is refused whatever the role
    backend: Backend = choice.cls(config)
    ops = backend.make_ops()
    model = backend.load_model(path, ops, lambda done, total: progress("load", done, total))
    drafter = None
    if config.speculative is not None:
        chosen = plugins.drafter_class(config.speculative.method)
        drafter = make_drafter(chosen, config, backend, ops, model, lambda *parts: progress("load", *parts))
    shape = model.kv_shape(config.block_size)
    bytes_per_block = shape.bytes_per_block(_ITEM_BYTES[ops.dtype])
    identity = kv_identity(path, f"{ops.name}/{ops.dtype}/{shape}")
    storage = open_kv_storage(config, plugins, identity)
    if drafter is not None and drafter.kv_shape is not None:
        bytes_per_block += drafter.kv_shape.bytes_per_block(_ITEM_BYTES[ops.dtype])
    limits = resolve_limits(
        config,
        model_max_len=model.max_positions,
        vocab_size=model.vocab_size,
        bytes_per_block=bytes_per_block,
        free_bytes=backend.free_memory(),
        default_pipeline_depth=backend.default_pipeline_depth,
    )
    runner = Runner(ops, model, limits, drafter)
    prefill_token = runner.warm_up(lambda done, total: progress("warmup", done, total))
    kv_events = bool(config.kv_events) and config.enable_prefix_caching
    info = EngineInfo(
        model=config.model,
        architecture=model.architecture,
        num_parameters=model.num_parameters,
        backend=choice.name,
        backend_reason=choice.reason,
        device=_described(backend),
        dtype=ops.dtype,
        dtype_reason=backend.dtype_reason if config.dtype == "auto" else "asked for",
        vocab_size=limits.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks,
        kv_cache_bytes=limits.num_kv_blocks * bytes_per_block,
        pipeline_depth=limits.pipeline_depth,
        host_kv_bytes=0 if storage.keep is None else config.host_kv_memory,
        kv_store=storage.summary,
        kv_store_answers=storage.reachable,
        role=config.role,
        kv_connector=config.kv_connector if config.role == "decode" else None,
        emulated=backend.emulated,
        kv_events=kv_events,
        epoch=epoch,
    )
    drafts = None
    if config.speculative is not None and limits.max_drafts:
        drafts = DraftControl(limits.max_num_seqs, limits.max_drafts, config.speculative.cheap_tokens)
    paired = config.role != "mixed"
    scheduler = Scheduler(
        limits,
        policy,
        victims,
        storage.hasher,
        drafts=drafts,
        keep_kv=storage.keep,
        paired=paired,
        kv_events=kv_events,
        epoch=epoch,
    )
    trace = None
    if config.trace is not None:
        header = TraceHeader(
            model=info.model,
            backend=info.backend,
            device=info.device,
            epoch=epoch,
            started=time.time(),
            speculation=None if config.speculative is None else config.speculative.method,
            limits=limits,
        )
        trace = TraceWriter(Path(config.trace), header, time.monotonic_ns(), config.trace_limit)
    cache, queue = LockedKVCache(runner.cache), CompletionQueue(wake)
    transfer: Receiver | Sender | NullKVPort = NullKVPort()
    if paired:
        transfer = open_kv_transfer(config, plugins, limits, cache, ops.dtype, identity, queue)
        info = msgspec.structs.replace(info, kv_port=transfer.port if isinstance(transfer, Sender) else None)
    kv = JoinedKVPort(queue, start_kv_offload(storage, config, cache, ops.dtype, queue), transfer)
    device = make_device(runner, limits.pipeline_depth, config.output_transport)
    return Engine(
        info,
        scheduler,
        device,
        kv,
        watchdog_seconds=config.watchdog_seconds,
        prefill_token=prefill_token,
        trace=trace,
    )


def _described(backend: Backend) -> str:
    """Return a backend's line about its device, which may be silent about being emulated: this is not."""
    line = backend.describe()
    return f"emulated: {line}" if backend.emulated and "emulated" not in line.lower() else line
