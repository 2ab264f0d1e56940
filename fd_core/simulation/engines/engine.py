"""A production engine and its client under the virtual clock, and the simulated server process around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from fd_core.config import EngineConfig, Limits
from fd_core.disagg.ticket import read_ticket
from fd_core.effects.port import CompletionQueue, JoinedEffectPort
from fd_core.engine.clients.client import DeltaStream, SingleEngineClient
from fd_core.engine.core import Engine, EnginePort
from fd_core.engine.loaded_adapters import EngineAdapters
from fd_core.engine.process.messages import ClientMessage, EngineInfo, EngineMessage, StepEvents, Submit
from fd_core.engine.process.service import EngineService, admission_notifier
from fd_core.engine.tracing.format import TraceHeader
from fd_core.engine.tracing.writer import TraceWriter
from fd_core.errors import BadRequest, EngineDead, FdError
from fd_core.kv.prefix import PrefixHasher
from fd_core.ops.contract import KVCache
from fd_core.plugins import SCHEDULER, SCHEDULING_POLICY, VICTIMS, Plugins
from fd_core.router.workers import Role
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.requests import check_spec
from fd_core.scheduling.running.drafts import make_draft_control
from fd_core.simulation.clock.timeline import LocalTimeline, ScheduledEvent, Timeline
from fd_core.simulation.clock.waits import FRONT, RESTART, STEP, WaitAccount
from fd_core.simulation.costs.profile import Costs
from fd_core.simulation.engines.device import END, AnswerOf, PlanComputer, SimulatedDevice
from fd_core.simulation.storage.storage import SECRET
from fd_core.types import Delta, RequestSpec, StepPlan
from fd_core.types.kv_events import KVEvent


@dataclass(frozen=True, slots=True)
class OutsideParts:
    """Components that keep and move KV outside the device, created anew for each epoch of an engine."""

    port: EnginePort
    keep: OffloadSelection | None = None
    kv_port: int | None = None
    kill: Callable[[], None] = lambda: None
    """Ends operations in progress there, as the death of the process does."""
    share: Callable[[Callable[[float], float]], None] = lambda _: None
    """Registers a function that receives the processor time spent there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPool:
    """Identical workers, as a pool of a deployment."""

    config: EngineConfig
    limits: Limits
    costs: Costs
    profile: str
    """Label of the costs with their origin, measured or calculated."""
    count: int = 1
    acceptance: float = 0.0
    """Probability that a draft is accepted, if those before it were."""
    max_queued_requests: int = 1024
    restart_seconds: float | None = 10.0
    """Time to load a replacement of a failed engine; None makes the server exit with its engine."""
    computer: Callable[[Limits, AnswerOf], PlanComputer] | None = None
    """Creates the computer of plans; None takes `ScriptedComputer`."""
    shares_processor: bool = False
    """True if serving, copies and transfers take time of the processor that computes steps."""
    block_bytes: int | None = None
    """Bytes of a KV block of the simulated model; None keeps no KV outside the device, regardless of `config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Parts from which every epoch of one simulated engine is created."""

    pool: SimulatedPool
    plugins: Plugins
    computer: Callable[[], PlanComputer]
    """Creates the computer of one epoch, with an empty KV cache."""
    outside: Callable[[Timeline, CompletionQueue, KVCache], OutsideParts] | None = None
    """Creates the parts outside the device, from its process's time and the blocks on it; None creates none."""
    hasher: PrefixHasher | None = None
    """Hashes prefixes; None turns prefix caching off."""
    check: bool = False
    """True to audit slots and blocks after every turn."""
    adapters: Callable[[EngineConfig, None], EngineAdapters] = EngineAdapters
    """Creates the registry of adapters that requests may select; there is no folder to read one for a model from."""
    trace: Path | None = None
    beside: Callable[[StepPlan], float] | None = None
    account_of: Callable[[str], WaitAccount | None] = lambda _: None
    """Finds the time account of a request."""


class SimulatedEngineClient(SingleEngineClient):
    """Production client of one engine, which it runs on the virtual clock in place of a process."""

    def __init__(self, timeline: Timeline, parts: EngineParts) -> None:
        """Start the engine at once."""
        super().__init__(parts.pool.config)
        self.deaths = 0
        self.on_kv_events: Callable[[Sequence[KVEvent]], None] = lambda _: None
        """Called with the prefixes that the device stored and evicted."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when an epoch is about to end, while its engine still exists."""
        self.on_state: Callable[[], None] = lambda: None
        self._timeline = timeline
        self._parts = parts
        self._restart_seconds = parts.pool.restart_seconds
        self._epoch = 0
        self._inbox: list[ClientMessage] = []
        self._next: ScheduledEvent | None = None
        """The next turn, or the completion of the step in flight."""
        self._occupied = False
        """True if the loop is within a turn, or waits for the step in flight."""
        self._woken = False
        self._kept: list[Delta] = []
        """Last deltas of requests that ended before the step in flight."""
        self._start()

    def end_trace(self) -> None:
        """Write the rest of this epoch's trace."""
        if self._trace is not None:
            self._trace.close(self._nanoseconds())

    def _over(self) -> None:
        """End this epoch: no more of its output is delivered."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self.alive:
            for name in self._streams:
                if (account := self._parts.account_of(name)) is not None:
                    account.wait_for(RESTART)
            self.on_over()
            self._outside.kill()
            self.end_trace()

    def die(self, reason: str) -> None:
        """End this epoch at once; another one starts later, if restarts are enabled."""
        if not self.alive:
            return
        self.deaths += 1
        self._inbox.clear()
        self._over()
        if self._restart_seconds is None:
            self._fail_all(f"the engine failed: {reason}")
        else:
            self._engine_lost(f"the engine failed: {reason}")
            self._timeline.after(self._restart_seconds, self._restart)
        self.on_state()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """End the engine."""
        self.end()

    def end(self) -> None:
        """End the engine for good, and every request with it."""
        self._over()
        self._restart_seconds = None
        self._fail_all("the engine was closed")
        self.on_state()

    def _send(self, message: ClientMessage) -> None:
        self._inbox.append(message)
        if isinstance(message, Submit) and (account := self._parts.account_of(message.spec.request_id)) is not None:
            account.wait_for(STEP)
        self._wake()

    def _wake(self) -> None:
        """Make the engine read its messages and completions, unless a step is in flight: then after the step."""
        if not self.alive:
            return
        if self._occupied:
            self._woken = True
            return
        if self._next is None or self._next.when > self._timeline.now:
            if self._next is not None:
                self._next.cancel()
            self._next = self._timeline.at(self._timeline.now, self._turn)

    def _start(self) -> None:
        self._epoch += 1
        parts, pool, timeline = self._parts, self._parts.pool, self._timeline
        queue = CompletionQueue(self._wake)
        computer = parts.computer()
        outside = OutsideParts(JoinedEffectPort(queue, None, None))
        if parts.outside is not None:
            outside = parts.outside(timeline, queue, computer.cache)
        self._outside = outside
        self._trace = self._open_trace()
        self.device = SimulatedDevice(timeline, pool.costs, computer, limits=pool.limits)
        if parts.beside is not None:
            self.device.beside = parts.beside
        if pool.shares_processor:
            outside.share(self.device.run_on_step_cpu)
        self.engine = Engine(
            _info(pool, self._epoch, outside),
            self._scheduler(outside),
            self.device,
            outside=outside.port,
            adapters=parts.adapters(pool.config, None),
            watchdog_seconds=pool.config.watchdog_seconds,
            prefill_token=1e-4,  # seconds, estimate before any was measured
            admitted=admission_notifier(self._deliver, self._epoch),
            trace=self._trace,
            clock=timeline.clock,
        )
        self._service = EngineService(self.engine, self._deliver)
        self._occupied = self._woken = False
        self._kept = []
        self._engine_ready(self.engine.info)

    def _nanoseconds(self) -> int:
        return round(1e9 * self._timeline.now)

    def _open_trace(self) -> TraceWriter | None:
        parts, config = self._parts, self._parts.pool.config
        if parts.trace is None:
            return None
        header = TraceHeader(
            model=config.model,
            backend="simulated",
            device="simulated",
            epoch=self._epoch,
            started=self._timeline.now,
            speculation=None if config.speculative is None else config.speculative.method,
            limits=parts.pool.limits,
        )
        return TraceWriter(parts.trace, header, config.trace_limit, nanoseconds=self._nanoseconds, complete=True)

    def _restart(self) -> None:
        if self._restart_seconds is not None:
            self._start()
            self.on_state()

    def _scheduler(self, outside: OutsideParts) -> Scheduler:
        hasher, plugins = self._parts.hasher, self._parts.plugins
        config, limits = self._parts.pool.config, self._parts.pool.limits
        return plugins.load(SCHEDULER, config.scheduler)(
            SchedulerSetup(
                limits=limits,
                policy=plugins.load(SCHEDULING_POLICY, config.scheduling_policy)(),
                victims=plugins.load(VICTIMS, config.victim_policy)(),
                hasher=hasher,
                drafts=make_draft_control(limits, config.speculative),
                keep_kv=outside.keep,
                paired=config.role != "mixed",
                kv_events=bool(config.kv_events) and hasher is not None,
                epoch=self._epoch,
                clock=self._timeline.clock,
            )
        )

    def _deliver(self, message: EngineMessage) -> None:
        if not isinstance(message, StepEvents):
            return
        if message.kv:
            self.on_kv_events(message.kv)
        self._dispatch(message)

    def _turn(self) -> None:
        """Do the work of `serve_engine` up to its next wait, for the device or for messages."""
        self._next = None
        self._occupied, self._woken = True, False
        inbox, self._inbox = self._inbox, []
        engine = self.engine
        for message in inbox:
            if isinstance(message, Submit) and (account := self._parts.account_of(message.spec.request_id)) is not None:
                account.enter(partial(engine.phases, message.spec.request_id))
        self._kept = self._service.take(inbox)
        self._kept += engine.begin_steps()
        if engine.num_in_flight:
            stalls = self._timeline.now + self._parts.pool.config.watchdog_seconds
            ready = self.device.ready_at
            late = ready > stalls
            self._next = self._timeline.at(stalls if late else ready, self._stalled if late else self._answered)
            return
        self._tell(self._kept)
        self._rest(0.005)  # all requests wait for events outside steps: check their deadlines again

    def _answered(self) -> None:
        """Commit the oldest step in flight, unless sharing its processor delays it, and begin the next turn."""
        ready = self.device.ready_at
        if self._timeline.now + 1e-9 < ready < math.inf:  # clocks of workers may differ in the last digits
            self._next = self._timeline.at(ready, self._answered)
            return
        deltas = self.engine.end_step(self.device.collect(math.inf))
        self._tell(self._kept + deltas if self._kept else deltas)
        if self.alive and self._timeline.quiet and (self._woken or self._inbox or self.engine.has_work):
            self._turn()  # it would be called at once
        else:
            self._rest(0.0)

    def _rest(self, seconds: float) -> None:
        """End the turn; the next one is due at once on messages, in `seconds` if there is work, else on messages."""
        self._occupied, self._next = False, None
        if not self.alive:
            return
        if self._woken or self._inbox:
            self._next = self._timeline.at(self._timeline.now, self._turn)
        elif self.engine.has_work:
            self._next = self._timeline.after(seconds, self._turn)

    def _tell(self, deltas: list[Delta]) -> None:
        if self._parts.check:
            self.engine.check_integrity()
        self._service.send(deltas, self._timeline.now)

    def _stalled(self) -> None:
        seconds = self._parts.pool.config.watchdog_seconds
        self.die(str(EngineDead(f"a step timed out after {seconds:g} s")))


def _info(pool: SimulatedPool, epoch: int, outside: OutsideParts) -> EngineInfo:
    config, limits = pool.config, pool.limits
    return EngineInfo(
        model=config.model,
        architecture="simulated",
        num_parameters=0,
        backend="simulated",
        backend_reason="",
        scheduler=config.scheduler,
        device="simulated",
        dtype="none",
        kv_dtype="none",
        vocab_size=limits.vocab_size,
        eos_token_ids=(END,),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks,
        kv_cache_bytes=0,
        pipeline_depth=limits.pipeline_depth,
        role=config.role,
        kv_port=outside.kv_port,
        kv_events=bool(config.kv_events),
        structured_output=False,
        epoch=epoch,
    )


class WorkerCaller(Protocol):
    """Sender of a request to a worker. Calls are made when the worker sends; the callee adds network delays."""

    def answered(self, delta: Delta) -> None:
        """The worker sends a part of the response."""

    def refused(self, status: int, reason: str) -> None:
        """The worker rejects the request, or cannot continue it, and reports why."""

    def lost(self, reason: str) -> None:
        """The connection is lost."""


class _BadTicket(FdError):
    pass


class SimulatedWorker:
    """One server process, or none between its death and its restart."""

    def __init__(
        self, timeline: LocalTimeline, index: int, pool: SimulatedPool, make_parts: Callable[[str, int], EngineParts]
    ) -> None:
        """`make_parts` makes the parts of the engine from the worker's name and its process's number, from 1 on."""
        self.index = index
        self.role: Role = pool.config.role  # type: ignore[assignment]  # one of the roles by its own constraint
        self.name = f"{self.role}{index}"
        self.url = f"http://{self.name}:8000"
        self.processes = 0
        self.client: SimulatedEngineClient | None = None
        self.leaving = False
        """True if it accepts no more requests, because it is shutting down."""
        self.on_start: Callable[[SimulatedEngineClient], None] = lambda _: None
        self.on_answer: Callable[[], None] = lambda: None
        """Called with each part of a response that the worker sends."""
        self.timeline = timeline
        """Clock of this address; freezes and wrong clocks are faults of it."""
        self._pool = pool
        self._make_parts = make_parts
        self._busy_until = 0.0
        self._callers: dict[str, tuple[WorkerCaller, DeltaStream | None]] = {}
        self.start()

    @property
    def instance(self) -> str:
        """Name of the process."""
        return f"{self.name}/{self.processes}"

    @property
    def up(self) -> bool:
        """True if the process exists."""
        return self.client is not None

    @property
    def healthy(self) -> bool:
        """State of `/health`: a draining worker still completes the requests that it accepted."""
        return self.client is not None and self.client.alive

    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._callers)

    def start(self) -> None:
        """Start a process with an empty engine."""
        self.processes += 1
        self.leaving = False
        self._parts = self._make_parts(self.name, self.processes)
        self.client = SimulatedEngineClient(self.timeline, self._parts)
        self._busy_until = self.timeline.now
        self.on_start(self.client)

    def drain(self) -> None:
        """Accept no more requests, as before an orderly shutdown; complete those that were accepted."""
        if self.client is not None:
            self.leaving = True
            self.client.engine.stop()

    def kill(self) -> None:
        """Kill the process: pending callers get no response."""
        if self.client is None:
            return
        client, self.client = self.client, None
        callers, self._callers = self._callers, {}
        client.end()
        for caller, _ in callers.values():
            caller.lost("the worker's process ended")

    def take(self, spec: RequestSpec, caller: WorkerCaller) -> None:
        """Receive a request from the network; `caller` gets its events. `prefill_at` is the ticket of the router."""
        client = self.client
        if client is None:
            caller.lost("no process listens at the worker's address")
            return
        self._callers[spec.request_id] = caller, None
        if (account := self._parts.account_of(spec.request_id)) is not None:
            account.wait_for(FRONT)
        taken = self._pool.costs.request(len(spec.prompt))
        if self._pool.shares_processor:
            client.device.run_on_step_cpu(taken)
        self._busy_until = max(self._busy_until, self.timeline.now) + taken
        self.timeline.at(self._busy_until, lambda: self._submit(client, spec, caller))

    def leave(self, request_id: str) -> None:
        """Disconnect the client of a request: its connection was closed."""
        _, stream = self._callers.pop(request_id, (None, None))
        if stream is not None:
            stream.abort()

    def _submit(self, client: SimulatedEngineClient, spec: RequestSpec, caller: WorkerCaller) -> None:
        name = spec.request_id
        if self.client is not client or name not in self._callers:
            return  # the process ended, or the client disconnected
        answered = caller.answered

        def news(delta: Delta | None) -> None:
            if self._pool.shares_processor:
                client.device.run_on_step_cpu(self._pool.costs.delivery())
            self.on_answer()
            if delta is None:
                if self._callers.pop(name, None) is not None:
                    caller.lost("the engine is permanently lost")
                return
            if delta.finish_reason is not None:
                self._callers.pop(name, None)
            answered(delta)

        try:
            if self.leaving:
                raise EngineDead("the server is shutting down")
            most = self._pool.max_queued_requests
            if client.active_requests >= client.info.max_num_seqs + most:
                raise EngineDead(f"the queue is full ({most} requests)")
            check_spec(spec, client.info.max_model_len)
            if spec.prefill_at:
                if self.role != "decode":
                    raise BadRequest("a prefill worker was assigned to a worker without the decode role")
                if (peer := read_ticket(SECRET, spec.request_id, spec.prefill_at)) is None:
                    raise _BadTicket("the ticket to a prefill worker is not signed with the secret of this deployment")
                spec = msgspec.structs.replace(spec, prefill_at=peer)
            stream = client.submit(spec, news)
        except FdError as error:
            del self._callers[name]
            status = 503 if isinstance(error, EngineDead) else 403 if isinstance(error, _BadTicket) else 400
            caller.refused(status, str(error))
            return
        self._callers[name] = caller, stream
