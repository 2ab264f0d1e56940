"""The engine: scheduler, runner and output processing, joined into steps."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from fd_core.disagg.stats import ReceiverStats, SenderStats
from fd_core.effects import operations
from fd_core.effects.port import EffectPort
from fd_core.engine.building.kv_offload import prefill_request, prefill_request_id
from fd_core.engine.computing import Computing
from fd_core.engine.device import Device, RunnerDevice
from fd_core.engine.loaded_adapters import EngineAdapters
from fd_core.engine.process import messages
from fd_core.engine.process.messages import ControlOrder, EngineInfo, EngineStats, LeaseStats
from fd_core.engine.tracing.writer import TraceWriter
from fd_core.errors import BadRequest, EngineDead, FdError
from fd_core.kv.tiers.stats import TierStats
from fd_core.ops.weights import Adapter
from fd_core.runner.observing import ObserverThread
from fd_core.runner.runner import Runner
from fd_core.scheduling.contract import RequestActivity, Scheduler, SchedulerHoldings
from fd_core.structured.compiler import CompilerStats
from fd_core.types import AdapterInfo, Delta, FinishReason, PrefillJob, PrefillTrace, RequestSpec, StepOutput, StepPlan
from fd_core.types.checks import check_request_ids
from fd_core.types.kv_events import KVEvent

AdmissionSink = Callable[[tuple[str, ...]], None]
"""Notified of the requests that enter a slot, before a step computes them."""

Controlled = Callable[[FdError | None], None]
"""Called once an order is carried out, or with the reason why it is not: then nothing has changed."""

EnginePort = EffectPort[tuple[TierStats | None, ReceiverStats | SenderStats | None, CompilerStats | None]]
"""Storage, transfers and the grammar compiler of one engine, as one port."""


_WAIT_SECONDS = 0.005
"""Sleep in seconds between polls of the inbox while all requests wait for something outside steps."""


_MIN_PREFILL_TOKENS: Final = 32
"""Smaller prefills are ignored: they measure the overhead of the step rather than the time per token."""
_SHARE: Final = 0.2
"""Weight of a step in the moving average."""


class PrefillPace:
    """Moving average of the prefill time per prompt token, in seconds."""

    def __init__(self, token: float) -> None:
        """`token`: seconds per token before the first request, measured in the warm-up."""
        self._token = token
        self._answered = 0.0

    def observe(self, plan: StepPlan, submitted: float, answered: float) -> operations.PrefillPaceMeasured | None:
        """Update from a step; return the new average if the step was informative. Times in seconds of one clock."""
        begun = max(submitted, self._answered)  # the device computes one step after the other
        self._answered = answered
        tokens = int(plan.num_tokens.sum())
        if tokens < _MIN_PREFILL_TOKENS or tokens == len(plan.num_tokens):
            return None
        prefill = int(plan.num_tokens[plan.num_tokens > plan.num_drafts + 1].sum())
        if prefill < max(_MIN_PREFILL_TOKENS, tokens // 2):
            return None
        self._token += _SHARE * ((answered - begun) / tokens - self._token)
        return operations.PrefillPaceMeasured(self._token)


_AT_ONCE: Final = messages.ChangeAdapters | messages.ResumeGeneration | messages.WakeUp
"""Orders that need no preemption."""


class EngineProbe(msgspec.Struct, frozen=True):
    """Internal components of one engine, for audits and tests: modifying them may break every invariant."""

    scheduler: Scheduler
    device: Device
    watchdog_seconds: float

    @property
    def runner(self) -> Runner:
        """Runner of the device. Raises `TypeError` for a device without a runner."""
        if not isinstance(self.device, RunnerDevice):
            raise TypeError("this engine's device has no runner")
        return self.device.runner


class Engine:
    """Runs requests to completion, step by step. Used from one thread."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        device: Device,
        outside: EnginePort,
        adapters: EngineAdapters,
        *,
        watchdog_seconds: float,
        prefill_token: float,
        computing: Computing | None = None,
        admitted: AdmissionSink = lambda _: None,
        trace: TraceWriter | None = None,
        observer: ObserverThread | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefill_token`: seconds per prompt token before the first request; `computing`: loads weights, None if
        there are none; `clock` in seconds.
        """
        self.info = info
        self._scheduler = scheduler
        self._device = device
        self._watchdog_seconds = watchdog_seconds
        self._outside = outside
        self._adapters = adapters
        self._computing = computing
        self._num_updates = 0
        self.kv_events: list[KVEvent] = []
        """Prefixes added to and evicted from the device cache since `take_kv_events`."""
        self.prefill_traces: list[PrefillTrace] = []
        """Traced prefill jobs that ended since `take_prefill_traces`."""
        self._prefill_pace = PrefillPace(prefill_token)
        scheduler.complete(operations.PrefillPaceMeasured(prefill_token))
        self._stopping = False
        self._trace = trace
        self._observer = observer
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        """Plans in flight, with their submission times."""
        self._orders: deque[tuple[ControlOrder, Controlled]] = deque()
        """Orders that wait until nothing is in a slot, oldest first."""
        self._transfers = operations.ChangeTransfers("")
        """State of transfers after the orders so far."""
        self._admitted = admitted
        self._clock = clock

    @property
    def has_work(self) -> bool:
        """Return True if a step would make progress, now or after something in flight completes."""
        return self._scheduler.has_work or bool(self._in_flight or self._orders)

    def submit(self, spec: RequestSpec) -> list[Delta]:
        """Queue a request; one that can never run gets its last delta at once."""
        try:
            if spec.params.grammar is not None and not self.info.structured_output:
                raise BadRequest("structured output is disabled on this engine", field="grammar")
            self._add(spec)
        except BadRequest as error:
            return [Delta(spec.request_id, finish_reason=FinishReason.ERROR, error=str(error))]
        return []

    def abort(self, request_ids: Iterable[str]) -> list[Delta]:
        """Abort requests; returns the last deltas of those that ended at once. Idempotent."""
        deltas = (self._scheduler.abort(request_id) for request_id in request_ids)
        return self._ended([delta for delta in deltas if delta is not None])

    def abort_all(self) -> list[Delta]:
        """Abort everything."""
        return self.abort(self._scheduler.request_ids())

    def control(self, order: ControlOrder, done: Controlled) -> None:
        """Carry out an order and call `done`: at once, or in a later step when every request was preempted for it."""
        self._orders.append((order, done))

    def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Add a LoRA adapter; raises `BadRequest` or `ModelError`, and then nothing has changed."""
        info = self._adapters.load(name, folder, self._hold)
        self.info = msgspec.structs.replace(self.info, adapters=self._adapters.infos)
        return info

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Reject new requests for an adapter; running ones continue. Raises `BadRequest` for an unknown adapter."""
        info = self._adapters.unload(name)
        self.info = msgspec.structs.replace(self.info, adapters=self._adapters.infos)
        return info

    def stop(self) -> None:
        """Reject new prefill jobs of decode workers; running ones continue."""
        self._stopping = True

    def step(self) -> list[Delta]:
        """Keep up to `pipeline_depth` plans in flight, then commit the oldest result."""
        ended = self.begin_steps()
        if not self._in_flight:
            if self._scheduler.has_work:
                self._outside.wait(_WAIT_SECONDS)
            return ended
        deltas = self.end_step(self._device.collect(self._watchdog_seconds))
        return ended + deltas if ended else deltas

    @property
    def num_in_flight(self) -> int:
        """Plans that were submitted and whose results are pending."""
        return len(self._in_flight)

    def begin_steps(self) -> list[Delta]:
        """Submit plans until `pipeline_depth` are in flight or none is left; return what ended before any step."""
        if self._trace is not None:
            self._trace.turn_began(self._nanoseconds())
        if not self._in_flight:
            self._device.check()
        if self._adapters.leaving and not self.info.sleep_level:
            self._adapters.sweep(self._scheduler.request_ids(), self._hold)
        if self._orders:
            self._carry_out()
        ended: list[Delta] = []
        while len(self._in_flight) < self.info.pipeline_depth:
            ended += self._complete()
            plan, effects = self._scheduler.plan()
            if effects is not operations.NO_EFFECTS:
                self._perform(effects)
            if plan is None:
                if effects.operations:
                    continue  # some operations complete at once
                break
            if plan.admissions:
                self._admitted(tuple(admission.request_id for admission in plan.admissions))
            self._device.submit(plan)
            self._in_flight.append((plan, self._clock()))
        return ended

    def end_step(self, output: StepOutput) -> list[Delta]:
        """Commit the result of the oldest plan in flight."""
        plan, submitted = self._in_flight.popleft()
        if (pace := self._prefill_pace.observe(plan, submitted, self._clock())) is not None:
            self._scheduler.complete(pace)
        deltas, effects = self._scheduler.commit(plan, output)
        if effects is not operations.NO_EFFECTS:
            self._perform(effects)
        if self._observer is not None:
            self._observer.step_ended(plan, output)
        if self._trace is not None:
            self._trace.step_ended(self._nanoseconds(), plan, output, deltas, self._scheduler.held())
        return deltas

    def stats(self) -> EngineStats:
        """Return the current gauges and counters."""
        kv, transfer, grammars = self._outside.stats()
        leases = None
        if transfer is not None:
            leases = LeaseStats(
                open=transfer.open_leases,
                receiver=transfer if isinstance(transfer, ReceiverStats) else None,
                sender=transfer if isinstance(transfer, SenderStats) else None,
            )
        return EngineStats(
            scheduler=self._scheduler.stats(),
            kv=kv,
            leases=leases,
            observer=None if self._observer is None else self._observer.stats(),
            grammars=grammars,
            masks=self._device.mask_stats(),
            compilations=self._device.compilation_stats(),
        )

    def holdings(self) -> SchedulerHoldings:
        """Return the slots and blocks that are currently held."""
        return self._scheduler.held()

    def phases(self, request_id: str) -> tuple[float, ...] | None:
        """Return the durations of an unfinished request, in seconds, as `Delta.phases`; None if unknown."""
        return self._scheduler.phases(request_id)

    def activities(self) -> dict[str, RequestActivity]:
        """Return the current activity of the requests that have not ended, by id."""
        return self._scheduler.activities()

    def take_kv_events(self) -> tuple[KVEvent, ...]:
        """Return the prefixes added and evicted since the last call; none unless events are enabled."""
        events = tuple(self.kv_events)
        self.kv_events.clear()
        return events

    def take_prefill_traces(self) -> tuple[PrefillTrace, ...]:
        """Return the traced prefill jobs that ended since the last call."""
        traces = tuple(self.prefill_traces)
        self.prefill_traces.clear()
        return traces

    def check_integrity(self) -> None:
        """Audit slots and blocks; raises `RuntimeError` if they contradict each other."""
        self._scheduler.check_integrity()

    def probe(self) -> EngineProbe:
        """Return the internal components of this engine, for audits and tests."""
        return EngineProbe(self._scheduler, self._device, self._watchdog_seconds)

    def close(self) -> None:
        """Stop the engine's threads; steps in flight are computed and dropped, queued writes to a store completed."""
        self._outside.close()
        self._device.close()
        self._device.close_runner()
        if self._observer is not None:
            self._observer.close()
        if self._trace is not None:
            self._trace.close(self._nanoseconds())

    def _carry_out(self) -> None:
        """Carry out the orders, in order; most of them wait until nothing is in a slot and no KV is being saved."""
        while self._orders:
            order, done = self._orders[0]
            error: FdError | None = None
            try:
                if not isinstance(order, _AT_ONCE) and not self._drained():
                    return
                self._apply(order)
            except MemoryError as failure:
                error = BadRequest(f"not enough memory: {failure}" if str(failure) else "not enough memory")
            except EngineDead:
                raise
            except FdError as failure:
                error = failure
            self._orders.popleft()
            if not self.info.stopped:
                self._scheduler.resume()
            self._change_transfers()
            done(error)

    def _change_transfers(self) -> None:
        """Let a pair of workers exchange no KV of other weights, and a prefill worker keep no decode worker waiting."""
        weights = "" if self._computing is None else self._computing.digest
        refusal = "the prefill worker is paused" if self.info.stopped else ""
        if self.info.role != "mixed" and (change := operations.ChangeTransfers(weights, refusal)) != self._transfers:
            self._transfers = change
            self._outside.perform([change])

    def _drained(self) -> bool:
        """Preempt every running request; return True once no slot is occupied and no block is read or written."""
        self._scheduler.pause()
        held = self._scheduler.held()
        return not (self._in_flight or held.running or held.loading or held.draining or held.fenced)

    def _apply(self, order: ControlOrder) -> None:
        level = self.info.sleep_level
        match order:
            case messages.ChangeAdapters() if level:
                raise BadRequest("adapters cannot change while the engine sleeps; wake it up first")
            case messages.ChangeAdapters(name, None):
                self.unload_adapter(name)
            case messages.ChangeAdapters(name, str(path)):
                self.load_adapter(name, Path(path))
            case messages.PauseGeneration():
                self.info = msgspec.structs.replace(self.info, paused=True)
            case messages.ResumeGeneration():
                self.info = msgspec.structs.replace(self.info, paused=False)
            case messages.ResetPrefixCache():
                self._perform(self._scheduler.forget_prefixes())
            case messages.UpdateWeights(path, version):
                self._device.perform(partial(self._changing.update, path))
                self._num_updates += 1
                # No other process, and no later one, may find KV of these weights under the name of their version.
                self._perform(self._scheduler.change_weights(secrets.token_bytes(16)))
                self.info = msgspec.structs.replace(self.info, weight_version=version or str(self._num_updates))
            case messages.Sleep(wanted) if wanted > level:
                self._device.perform(partial(self._changing.sleep, wanted > 1))
                self._perform(self._scheduler.forget_prefixes())
                self.info = msgspec.structs.replace(self.info, sleep_level=wanted)
            case messages.WakeUp() if level:
                self._device.perform(partial(self._changing.wake_up, level > 1))
                self.info = msgspec.structs.replace(self.info, sleep_level=0)

    @property
    def _changing(self) -> Computing:
        if self._computing is None:
            raise BadRequest("this engine has no weights")
        return self._computing

    def _complete(self) -> list[Delta]:
        """Process completed jobs and operations outside steps; return the last deltas of requests that they ended."""
        ended: list[Delta] = []
        for completion in self._outside.completions():
            match completion:
                case operations.PrefillJobArrived(job):
                    self._begin_job(job)
                case operations.PrefillTraced(trace):
                    self.prefill_traces.append(trace)
                case operations.LeaseEnded(lease):
                    self._scheduler.abort(prefill_request_id(lease))
                case _:
                    if self._trace is not None:
                        self._trace.kv.ended(completion)
                    if (end := self._scheduler.complete(completion)) is not None:
                        ended.append(end)
        return self._ended(ended) if ended else ended

    def _ended(self, deltas: list[Delta]) -> list[Delta]:
        """Return the last deltas of requests that ended outside steps."""
        if self._trace is not None:
            self._trace.requests_ended(deltas)
        return deltas

    def _begin_job(self, job: PrefillJob) -> None:
        try:
            if self._stopping:
                raise BadRequest("the prefill worker is shutting down")
            self._add(prefill_request(job))
        except BadRequest as error:
            self._outside.perform([operations.AbandonLease(job.lease, error.message, refused=True)])

    def _nanoseconds(self) -> int:
        return round(1e9 * self._clock())

    def _add(self, spec: RequestSpec) -> None:
        check_request_ids(spec, self.info.vocab_size)
        if spec.adapter:
            self._adapters.require(spec.adapter)
        effects = self._scheduler.add(spec)
        if effects is not operations.NO_EFFECTS:
            self._perform(effects)
        if spec.adapter:
            self._adapters.began(spec)
        if self._trace is not None:
            self._trace.request_arrived(self._nanoseconds(), spec)

    def _hold(self, adapters: Collection[Adapter]) -> None:
        self._device.perform(lambda runner: runner.adapters.replace(adapters))

    def _perform(self, effects: operations.Effects) -> None:
        self.kv_events.extend(effects.events)
        if self._trace is not None:
            self._trace.kv.began(effects)
        self._outside.perform(effects.operations)
