"""The scheduler: decides what each step computes, and applies each step's output to its requests.

Pure: no I/O, no clock, no randomness. `plan` is called for each step, `commit` for each output, in the same order. Both
return operations outside steps as effects; `complete` applies their completions.

    add, abort ---> AdmissionPlanner --> RunningBatch --> Planner --> plan
                         ^              (slots, blocks)                |
    complete ------------+------------------> ^                        v
                                              +---- OutputProcessor <---- output
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fd_core.effects import operations as effects
from fd_core.errors import BadRequest
from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.contract import (
    RequestActivity,
    Scheduler,
    SchedulerHoldings,
    SchedulerSetup,
    SchedulerStats,
)
from fd_core.scheduling.images import check_images
from fd_core.scheduling.operations.kv_offloading import KVOffloading, OffloadSelection
from fd_core.scheduling.operations.kv_transferring import KVTransferring
from fd_core.scheduling.operations.registry import Operations
from fd_core.scheduling.phases import PhaseClock
from fd_core.scheduling.prefixes import Prefixes
from fd_core.scheduling.requests import Event, Request, State, check_spec
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.scheduling.running.output_processor import OutputProcessor
from fd_core.scheduling.running.plan import PlanBuilder
from fd_core.scheduling.running.planner import Planner
from fd_core.scheduling.running.running_batch import RunningBatch
from fd_core.scheduling.running.slots import SlotStats, SlotTable
from fd_core.scheduling.waiting.admission_control import AdmissionControl
from fd_core.scheduling.waiting.admission_planner import AdmissionPlanner
from fd_core.scheduling.waiting.queue import WaitingQueue
from fd_core.types import GRAMMAR_FAULT, Delta, FinishReason, Phase, RequestSpec, StepOutput, StepPlan
from fd_core.types.kv_events import Recorder
from fd_core.types.metrics import snapshot


@dataclass(frozen=True, slots=True)
class SchedulerProbe:
    """The live parts of one scheduler, for audits and tests: changing them may break every invariant."""

    slots: SlotTable
    pool: BlockPool
    requests: Mapping[str, Request]
    """Requests that have not ended, by id."""
    waiting: WaitingQueue
    prefixes: Prefixes
    running_batch: RunningBatch
    operations: Operations
    offloading: KVOffloading
    transferring: KVTransferring
    control: AdmissionControl


class ContinuousBatchingScheduler(Scheduler):
    """Plans steps for at most `max_num_seqs` requests at a time under the step token budget.

    A request enters and leaves the batch at any step.
    """

    groups_layers = True

    def __init__(self, setup: SchedulerSetup) -> None:
        super().__init__(setup)
        limits, policy, hasher, drafts = setup.limits, setup.policy, setup.hasher, setup.drafts
        self._policy = policy
        self._recorder = Recorder() if setup.kv_events else None
        self._pool = pool = BlockPool(limits.num_kv_blocks, self._recorder)
        self._slots = slots = SlotTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.groups)
        self._drafts = drafts = drafts or DraftControl(limits.max_num_seqs, 0, 0)
        self._times = times = PhaseClock(setup.clock)
        self._waiting = waiting = WaitingQueue(policy, times)
        self._prefixes = prefixes = Prefixes(hasher, pool, self._recorder, waiting.wake, _groups=limits.groups)
        self._operations = Operations(pool)
        keep = setup.keep_kv or OffloadSelection(preempted=False)
        self._offloading = offloading = KVOffloading(
            pool, self._operations, limits.block_size, keep=keep, groups=limits.groups
        )
        self._transferring = transferring = KVTransferring(
            self._operations, limits.block_size, setup.paired, groups=limits.groups
        )
        control = AdmissionControl(0.0 if keep.preempted else 1.0)
        self._running_batch = running_batch = RunningBatch(
            slots, pool, prefixes, offloading, transferring, drafts, control, times, self._ended
        )
        self._admission_planner = AdmissionPlanner(
            _limits=limits,
            _policy=policy,
            _victims=setup.victims,
            _pool=pool,
            _slots=slots,
            _waiting=waiting,
            _prefixes=prefixes,
            _offloading=offloading,
            _transferring=transferring,
            _operations=self._operations,
            _control=control,
            _running_batch=running_batch,
            _times=times,
        )
        self._planner = Planner(
            limits,
            setup.epoch,
            policy,
            setup.victims,
            pool,
            slots,
            drafts,
            running_batch,
            times,
            self.admit,
            self._admission_planner.displaced,
            _step=setup.first_step,
        )
        self._output_processor = OutputProcessor(
            slots,
            pool,
            drafts,
            running_batch,
            times,
            self._admission_planner.enqueue,
            _next_step=setup.first_step,
        )
        self._requests: dict[str, Request] = {}
        self._probe = SchedulerProbe(
            slots=slots,
            pool=pool,
            requests=self._requests,
            waiting=waiting,
            prefixes=prefixes,
            running_batch=running_batch,
            operations=self._operations,
            offloading=offloading,
            transferring=transferring,
            control=control,
        )
        self._arrivals = 0
        self._aborting: list[Request] = []
        """Running requests to abort in the next plan."""

    def add(self, spec: RequestSpec) -> effects.Effects:
        """Queue a request."""
        if spec.request_id in self._requests:
            raise BadRequest(f"a request with id {spec.request_id!r} is already running", field="request_id")
        check_spec(spec, self.limits.max_model_len)
        if spec.images:
            check_images(spec, self.limits)
        request = Request(
            spec, self._arrivals, self.limits.max_model_len, root=self._prefixes.root(spec.cache_salt, spec.adapter)
        )
        self._arrivals += 1
        self._requests[spec.request_id] = request
        request.queued_view = request.queued()
        self._policy.arrived(request.queued_view)
        self._admission_planner.enqueue(request)
        return self._effects()

    def abort(self, request_id: str) -> Delta | None:
        """End a request that waits or loads, and abort a running one with the next plan."""
        request = self._requests.get(request_id)
        if request is None or request.abort_requested:
            return None
        request.abort_requested = True
        if request.state is State.WAITING:
            self._admission_planner.remove(request)
            request.advance(Event.ABORT_WAITING)
            self._ended(request, FinishReason.ABORT)
        elif request.state is State.LOADING:
            self._running_batch.abort_loading(request)
        else:
            if request.state is State.RUNNING:
                self._aborting.append(request)
            return None
        return self._output_processor.end(request, FinishReason.ABORT)

    def request_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended."""
        return list(self._requests)

    @property
    def has_work(self) -> bool:
        """Return True if a request may advance, a slot is draining, or a KV operation is open."""
        operations, slots = self._operations, self._slots
        may_advance = self._requests and not (self._planner.paused and not slots.occupied.any())
        return bool(may_advance or operations.open or operations.effects or slots.num_draining)

    def pause(self) -> None:
        """Preempt every running request with the next plan, and admit none until `resume`."""
        self._planner.paused = True

    def resume(self) -> None:
        """Admit requests again."""
        self._planner.paused = False

    def forget_prefixes(self) -> effects.Effects:
        """Forget the prefixes in the device cache; KV outside the device stays."""
        self._pool.forget_prefixes()
        return self._effects()

    def change_weights(self, nonce: bytes) -> effects.Effects:
        """Forget all KV: waiting requests recompute theirs under new keys."""
        self._pool.forget_prefixes()
        self._prefixes.change_weights(nonce)
        for request in self._requests.values():
            self._admission_planner.remove(request)
            request.root = self._prefixes.root(request.spec.cache_salt, request.spec.adapter)
            request.chain.clear()
            request.stored = request.stored_on_host = 0
            request.save = None
            self._admission_planner.enqueue(request)
        return self._effects()

    def plan(self) -> tuple[StepPlan | None, effects.Effects]:
        """Decide the next step."""
        plan = None
        if self._requests:
            plan = self._planner.plan(self._aborting)
            self._aborting.clear()
        else:
            self._times.set_queue_phase(Phase.SCHEDULER)  # applies to requests that arrive next
        return plan, self._effects()

    def admit(self, builder: PlanBuilder, step: int) -> None:
        """Move waiting requests into free slots of the plan of step `step`, while budget, slots and blocks allow.

        Every plan that preempts and aborts nothing calls it, after all running rows were charged. A scheduler that
        admits requests at other times overrides it; requests that it does not admit are considered again by the next
        plan.
        """
        self._admission_planner.admit(builder, step)

    def commit(self, plan: StepPlan, output: StepOutput) -> tuple[list[Delta], effects.Effects]:
        """Apply the output of `plan`."""
        return self._output_processor.commit(plan, output), self._effects()

    def complete(self, completion: effects.Completion) -> Delta | None:
        """Apply a completion, or a change of the known stored KV; return the last delta of a request it ends."""
        match completion:
            case effects.Found():
                self._offloading.found(completion)
                self._waiting.wake(completion.operation)
            case effects.Saved():
                self._offloading.saved(completion)
                self._waiting.wake(completion.operation)
            case effects.Loaded():
                if (arrival := self._offloading.loaded(completion)) is not None:
                    self._running_batch.finish_load(*arrival)
            case effects.Fetched():
                if (arrival := self._transferring.fetched(completion)) is not None:
                    self._running_batch.finish_load(*arrival)
            case effects.Sent():
                self._operations.end(completion.operation, effects.Send)
            case effects.GrammarReady():
                return self._grammar_ready(completion)
            case effects.NotStored(keys):
                self._offloading.not_stored(keys)
            case effects.LoadPaceMeasured():
                self._offloading.load_or_recompute.load_measured(completion)
            case effects.PrefillPaceMeasured():
                self._offloading.load_or_recompute.prefill_measured(completion)
        return None

    def stats(self) -> SchedulerStats:
        """Return current gauges and counters."""
        slots = self._slots
        running, loading, draining = (int(column.sum()) for column in (slots.running, slots.loading, slots.draining))
        return SchedulerStats(
            slots=SlotStats(running=running, loading=loading, draining=draining, waiting=len(self._waiting)),
            blocks=self._pool.stats(),
            counters=snapshot(self._running_batch.counters),
            outputs=snapshot(self._output_processor.counters),
            drafts=self._drafts.stats(),
            offload=snapshot(self._offloading.counters),
            pace=self._offloading.load_or_recompute.pace if self._offloading.keep.anything else None,
            transfers=snapshot(self._transferring.counters) if self._transferring.paired else None,
            phases=self._times.stats(),
        )

    def phases(self, request_id: str) -> tuple[float, ...] | None:
        """Return the seconds of a request that has not ended, by phase."""
        request = self._requests.get(request_id)
        return None if request is None else self._times.durations(request.times)

    def activities(self) -> dict[str, RequestActivity]:
        """Return the current activity of the requests that have not ended."""
        current = self._times.current
        return {
            name: RequestActivity(request.state.name.lower(), current(request.times))
            for name, request in self._requests.items()
        }

    def held(self) -> SchedulerHoldings:
        """Return the resources that are currently held."""
        slots, blocks = self._slots, self._pool.stats()
        running, loading, draining = (int(column.sum()) for column in (slots.running, slots.loading, slots.draining))
        return SchedulerHoldings(
            waiting=len(self._waiting),
            loading=loading,
            running=running,
            draining=draining,
            owned=blocks.used,
            fenced=blocks.fenced,
            cached=blocks.cached,
            operations=len(self._operations.open),
        )

    def _grammar_ready(self, answer: effects.GrammarReady) -> Delta | None:
        """Resume the request that waits for a grammar, or end it if the grammar cannot be used."""
        _, request = self._operations.end(answer.operation, effects.CompileGrammar)
        if request is not None:
            request.compiling = None
        if request is None or answer.error is None:
            self._waiting.wake(answer.operation)
            return None
        self._admission_planner.remove(request)
        request.advance(Event.FAIL_WAITING)
        self._ended(request, FinishReason.ERROR)
        end = self._output_processor.end(request, FinishReason.ERROR)
        return msgspec.structs.replace(end, error=f"{GRAMMAR_FAULT}cannot be used: {answer.error}")

    def _effects(self) -> effects.Effects:
        wanted = self._operations
        if self._recorder is None and not (wanted.effects or wanted.decisions):
            return effects.NO_EFFECTS
        operations, decisions = wanted.take()
        events = () if self._recorder is None else self._recorder.take()
        return (
            effects.Effects(operations, decisions, events) if operations or decisions or events else effects.NO_EFFECTS
        )

    def _ended(self, request: Request, reason: FinishReason) -> None:
        request.ended = reason
        del self._requests[request.spec.request_id]
        queued = request.queued()
        self._policy.ended(queued, queued.num_tokens)
        if self._waiting.turns_move:
            self._waiting.turn_changed(request)
        if request.spec.prefill_job is not None:
            self._transferring.ended(request, reason)

    def probe(self) -> SchedulerProbe:
        """Return the parts of this scheduler, for audits and tests."""
        return self._probe

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if slots, requests and blocks contradict each other."""
        self._running_batch.check_integrity()
