"""A production engine and its client under the virtual clock: the loop, its deaths and its restarts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from fd_core.config import EngineConfig, Limits
from fd_core.effects.port import CompletionQueue, JoinedEffectPort
from fd_core.engine.clients.client import SingleEngineClient
from fd_core.engine.core import Engine, EnginePort
from fd_core.engine.loaded_adapters import EngineAdapters
from fd_core.engine.process.messages import ClientMessage, EngineInfo, EngineMessage, StepEvents, Submit
from fd_core.engine.process.service import EngineService, tells_admissions
from fd_core.engine.tracing.format import TraceHeader
from fd_core.engine.tracing.writer import TraceWriter
from fd_core.errors import EngineDead
from fd_core.kv.prefix import PrefixHasher
from fd_core.ops.contract import KVCache
from fd_core.plugins import SCHEDULER, SCHEDULING_POLICY, VICTIMS, Plugins
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.scheduling.operations.kv_offloading import KeepKV
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.simulation.clock.timeline import Appointment, Timeline
from fd_core.simulation.clock.waits import RESTART, STEP, WaitAccount
from fd_core.simulation.costs.profile_costs import Costs
from fd_core.simulation.engines.device import END, PlanComputer, SimulatedDevice
from fd_core.types import Delta, StepPlan
from fd_core.types.kv_events import KVEvent

_LOOK_SECONDS: Final = 0.005
"""How often an engine whose requests all wait for something outside steps looks at its deadlines."""
_ROUNDING: Final = 1e-9
"""Seconds by which clocks of workers may differ in the last digits."""
_CHEAP_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class OutsideParts:
    """What keeps and moves KV outside the device, made anew for each epoch of an engine."""

    port: EnginePort
    keep: KeepKV | None = None
    kv_port: int | None = None
    """Where decode workers reach a prefill worker."""
    kill: Callable[[], None] = lambda: None
    """Ends what is under way there, as the death of the process does."""
    share: Callable[[Callable[[float], float]], None] = lambda _: None
    """Has a function told what processor time is spent there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What every epoch of one simulated engine is made from."""

    config: EngineConfig
    limits: Limits
    costs: Costs
    plugins: Plugins
    computer: Callable[[], PlanComputer]
    """Makes what answers the plans of one epoch, with an empty KV cache."""
    outside: Callable[[Timeline, CompletionQueue, KVCache], OutsideParts] | None = None
    """Makes what is outside the device, from its process's time and the blocks on it; None has nothing there."""
    hasher: PrefixHasher | None = None
    """Names prefixes; None turns prefix caching off."""
    check: bool = False
    """Whether slots and blocks are audited after every turn."""
    adapters: Callable[[EngineConfig, None], EngineAdapters] = EngineAdapters
    """Makes what knows the adapters that requests may ask for; there is no folder to read one for a model from."""
    trace: Path | None = None
    """File that receives a trace of every step; None writes none."""
    shares_processor: bool = False
    """Whether serving, copies and transfers take time of the processor that computes steps."""
    beside: Callable[[StepPlan], float] | None = None
    """See `SimulatedDevice.beside`."""
    prefill_token: float = 1e-4
    """Seconds for a token of a prompt that the engine believes before it has measured any."""


class SimulatedEngineClient(SingleEngineClient):
    """The production client of one engine, which it runs on the virtual clock in place of a process."""

    def __init__(self, timeline: Timeline, parts: EngineParts, restart_seconds: float | None = None) -> None:
        """Start the engine at once. `restart_seconds`: time to load another one; None never starts another."""
        super().__init__(parts.config)
        self.deaths = 0
        """Epochs that died."""
        self.on_kv_events: Callable[[Sequence[KVEvent]], None] = lambda _: None
        """Called with what prefixes the device came to hold and lost."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when an epoch is about to end, with its engine still there."""
        self.on_state: Callable[[], None] = lambda: None
        """Called when an epoch has ended and when another one has begun."""
        self.account_of: Callable[[str], WaitAccount | None] = lambda _: None
        """Finds where the time of a request is noted."""
        self._timeline = timeline
        self._parts = parts
        self._restart_seconds = restart_seconds
        self._epoch = 0
        self._inbox: list[ClientMessage] = []
        self._next: Appointment | None = None
        """The next turn, or the answer to the step in flight."""
        self._occupied = False
        """Whether the loop is within a turn, or waits for the step in flight."""
        self._woken = False
        """Whether there was news meanwhile."""
        self._kept: list[Delta] = []
        """Last deltas of requests that ended before the step in flight."""
        self._start()

    def end_trace(self) -> None:
        """Write what is left of this epoch's trace."""
        if self._trace is not None:
            self._trace.close(self._nanoseconds())

    def _over(self) -> None:
        """This epoch ends: nothing of it is heard of any more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self.alive:
            for name in self._streams:
                if (account := self.account_of(name)) is not None:
                    account.wait_for(RESTART)
            self.on_over()
            self._outside.kill()
            self.end_trace()

    @property
    def device(self) -> SimulatedDevice:
        """What computes in this epoch."""
        return self._device

    @property
    def engine(self) -> Engine:
        """The engine of this epoch."""
        return self._service.engine

    def die(self, reason: str) -> None:
        """End this epoch in whatever it does; another one begins later, if any is to be started."""
        if not self.alive:
            return
        self.deaths += 1
        self._inbox.clear()
        self._over()
        if self._restart_seconds is None:
            self._went_down(f"the engine failed: {reason}")
        else:
            self._went_away(f"the engine failed: {reason}")
            self._timeline.after(self._restart_seconds, self._restart)
        self.on_state()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """End the engine."""
        self.end()

    def end(self) -> None:
        """End the engine for good, and every request with it."""
        self._over()
        self._restart_seconds = None
        self._went_down("the engine was closed")
        self.on_state()

    # Inside -----------------------------------------------------------------------------------------------

    def _send(self, message: ClientMessage) -> None:
        self._inbox.append(message)
        if isinstance(message, Submit) and (account := self.account_of(message.spec.request_id)) is not None:
            account.wait_for(STEP)
        self._wake()

    def _wake(self) -> None:
        """Have the engine look at its messages and completions, unless a step is computed: then it looks afterwards."""
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
        parts, timeline = self._parts, self._timeline
        queue = CompletionQueue(self._wake)
        computer = parts.computer()
        outside = OutsideParts(JoinedEffectPort(queue, None, None))
        if parts.outside is not None:
            outside = parts.outside(timeline, queue, computer.cache)
        self._outside = outside
        self._trace = self._open_trace()
        self._device = SimulatedDevice(timeline, parts.costs, computer, parts.limits)
        if parts.beside is not None:
            self._device.beside = parts.beside
        if parts.shares_processor:
            outside.share(self._device.work_beside)
        engine = Engine(
            _info(parts, self._epoch, outside),
            self._scheduler(outside),
            self._device,
            outside.port,
            parts.adapters(parts.config, None),
            watchdog_seconds=parts.config.watchdog_seconds,
            prefill_token=parts.prefill_token,
            admitted=tells_admissions(self._deliver, self._epoch),
            trace=self._trace,
            clock=timeline.clock,
        )
        self._service = EngineService(engine, self._deliver)
        self._occupied = self._woken = False
        self._kept = []
        self._came_up(engine.info)

    def _nanoseconds(self) -> int:
        return round(1e9 * self._timeline.now)

    def _open_trace(self) -> TraceWriter | None:
        parts, config = self._parts, self._parts.config
        if parts.trace is None:
            return None
        header = TraceHeader(
            model=config.model,
            backend="simulated",
            device="simulated",
            epoch=self._epoch,
            started=self._timeline.now,
            speculation=None if config.speculative is None else config.speculative.method,
            limits=parts.limits,
        )
        return TraceWriter(parts.trace, header, config.trace_limit, self._nanoseconds, complete=True)

    def _restart(self) -> None:
        if self._restart_seconds is not None:
            self._start()
            self.on_state()

    def _scheduler(self, outside: OutsideParts) -> Scheduler:
        parts, config, limits, plugins = self._parts, self._parts.config, self._parts.limits, self._parts.plugins
        drafts = None
        if limits.max_drafts:
            speculative = config.speculative
            cheap = _CHEAP_TOKENS if speculative is None else speculative.cheap_tokens
            drafts = DraftControl(limits.max_num_seqs, limits.max_drafts, cheap, drafter=speculative is not None)
        return plugins.load(SCHEDULER, config.scheduler)(
            SchedulerSetup(
                limits=limits,
                policy=plugins.load(SCHEDULING_POLICY, config.scheduling_policy)(),
                victims=plugins.load(VICTIMS, config.victim_policy)(),
                hasher=parts.hasher,
                drafts=drafts,
                keep_kv=outside.keep,
                paired=config.role != "mixed",
                kv_events=bool(config.kv_events) and parts.hasher is not None,
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
        """Do what `serve_engine` does until it waits: for the device, or for news."""
        self._next = None
        self._occupied, self._woken = True, False
        inbox, self._inbox = self._inbox, []
        engine = self.engine
        for message in inbox:
            if isinstance(message, Submit) and (account := self.account_of(message.spec.request_id)) is not None:
                account.enter(partial(engine.phases, message.spec.request_id))
        self._kept = self._service.take(inbox)
        self._kept += engine.begin_steps()
        if engine.num_in_flight:
            stalls = self._timeline.now + self._parts.config.watchdog_seconds
            ready = self._device.ready_at
            late = ready > stalls
            self._next = self._timeline.at(stalls if late else ready, self._stalled if late else self._answered)
            return
        self._tell(self._kept)
        self._rest(_LOOK_SECONDS)

    def _answered(self) -> None:
        """The oldest step in flight is computed, unless it shared its processor: commit it, and begin the next turn."""
        ready = self._device.ready_at
        if self._timeline.now + _ROUNDING < ready < math.inf:
            self._next = self._timeline.at(ready, self._answered)
            return
        deltas = self.engine.end_step(self._device.collect(math.inf))
        self._tell(self._kept + deltas if self._kept else deltas)
        if self.alive and self._timeline.quiet and (self._woken or self._inbox or self.engine.has_work):
            self._turn()  # it would be called at once
        else:
            self._rest(0.0)

    def _rest(self, seconds: float) -> None:
        """End the turn; the next one is due at once after news, in `seconds` if there is work, else with news."""
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
        self._service.tell(deltas, self._timeline.now)

    def _stalled(self) -> None:
        seconds = self._parts.config.watchdog_seconds
        self.die(str(EngineDead(f"a step was not answered within {seconds:g} s")))


def _info(parts: EngineParts, epoch: int, outside: OutsideParts) -> EngineInfo:
    config, limits = parts.config, parts.limits
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
