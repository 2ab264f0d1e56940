"""An engine with separate plan and commit calls, so that a test controls the steps in flight.

Every plan and commit is audited: the budget is counted at the input of the forward pass, a block is never granted while
a step in flight touches it, and a revocation holds its slot until it is acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from fd_core.effects.operations import Effects
from fd_core.engine.core import Engine
from fd_core.engine.device import Device, make_device
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.requests import State
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler, SchedulerProbe
from fd_core.signals import Outcomes, read
from fd_core.testing.models.texts import Texts, plan_of
from fd_core.types import Admission, BlockGrant, RequestSpec, Revocation, SamplingParams, StepOutput, StepPlan


class Stepper:
    """Plans, executes and commits one step at a time, with an audit after each."""

    def __init__(self, engine: Engine, *, eager: bool = False, device: Device | None = None) -> None:
        """`eager` admits every request whose prompt fits, without reserving blocks for its output: much more
        preemption.

        Plans and outputs pass through `device`, if given; a step that times out fails.
        """
        self.engine = engine
        self.scheduler, self.runner = engine.probe().scheduler, engine.probe().runner
        self.probe = parts_of(engine)
        self.limits, self._device = self.scheduler.limits, device
        # No KV is stored outside the device unless a test performs the effects.
        self.probe.offloading.keep, self.probe.offloading.stores = OffloadSelection(preempted=False), True
        self.in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
        self.texts = Texts()
        self.computed: list[int] = []
        """Tokens in the input of each forward pass."""
        self._touched: dict[int, set[int]] = {}
        """Blocks that each step in flight reads or writes."""
        self.runner.watch_forward(lambda step: self.computed.append(int(np.shape(step.token_ids)[0])))
        if eager:
            self.probe.control.growth = lambda *_: 0  # type: ignore[method-assign]  # patched for the audit

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute a step at once."""
        if self._device is None:
            return self.runner.execute(plan)
        self._device.submit(plan)
        return self._device.collect(self.engine.probe().watchdog_seconds)

    def submit(self, *specs: RequestSpec) -> None:
        for spec in specs:
            self.perform(self.scheduler.add(spec))

    def abort(self, request_id: str) -> None:
        self.texts.take(self.engine.abort([request_id]))
        self.audit()

    def plan(self) -> StepPlan | None:
        """Plan a step and execute it; its output stays in flight."""
        plan, effects = self.scheduler.plan()
        self.perform(effects)
        if plan is None:
            return None
        busy = set().union(*self._touched.values())
        matched = {admission.slot: admission.computed // self.limits.block_size for admission in plan.admissions}
        for grant in plan.grants:
            shared = matched.get(grant.slot, 0) if grant.offset == 0 else 0
            fresh = set(grant.blocks[shared:].tolist())
            assert not fresh & busy, "a block was granted while a step in flight touches it"
        before = len(self.computed)
        self.in_flight.append((plan, self.execute(plan)))
        allowed = min(max(plan.total_tokens, self._padded(plan)), self.limits.max_num_batched_tokens)
        computed = sum(self.computed[before:])
        assert computed <= allowed, f"step {plan.step}: expected {allowed} charged tokens, computed {computed}"
        tables = self.runner.batch.tables[0]
        self._touched[plan.step] = {
            block
            for slot, start, count in zip(plan.slots, plan.starts, plan.num_tokens, strict=True)
            for block in tables[slot, : -(-(start + count) // self.limits.block_size)].tolist()
        }
        self.audit()
        return plan

    def answer(self) -> StepPlan:
        plan, output = self.receive()
        deltas, effects = self.scheduler.commit(plan, output)
        self.texts.take(deltas)
        self.perform(effects)
        self.audit()
        return plan

    def perform(self, effects: Effects) -> None:
        """Start the scheduler's effects outside steps; ignored by default."""

    def receive(self) -> tuple[StepPlan, StepOutput]:
        """Remove the oldest output in flight without committing it."""
        plan, output = self.in_flight.popleft()
        del self._touched[plan.step]
        return plan, output

    def run(self, depth: int, max_steps: int = 20_000, watch: Callable[[StepPlan], None] = lambda _: None) -> Texts:
        """Keep `depth` steps in flight until no request is left; `watch` is called with each plan."""
        for _ in range(max_steps):
            while len(self.in_flight) < depth and (plan := self.plan()) is not None:
                watch(plan)
            answered = bool(self.in_flight)
            if answered:
                self.answer()
            if not self.meanwhile() and not answered:
                break
        assert not self.engine.has_work, "the engine did not become idle"
        self.check_idle()
        return self.texts

    def meanwhile(self) -> bool:
        """Process an event between two steps; return True if there was one."""
        return False

    def plan_until(self, depth: int, state: State, request_id: str) -> bool:
        """Step until a request is in `state`; the plan of that transition is still in flight."""
        for _ in range(500):
            if self.state_of(request_id) is state:
                return True
            if len(self.in_flight) >= depth or self.plan() is None:
                if not self.in_flight:
                    return False
                self.answer()
        return False

    def state_of(self, request_id: str) -> State | None:
        request = self.probe.requests.get(request_id)
        return None if request is None else request.state

    def request_in(self, slot: int) -> str:
        request = self.probe.slots.requests[slot]
        assert request is not None
        return request.spec.request_id

    def check_idle(self) -> None:
        stats = self.engine.stats()
        gauges = (stats.scheduler.slots.running, stats.scheduler.slots.waiting, stats.scheduler.slots.draining)
        assert gauges == (0, 0, 0)
        assert (stats.scheduler.blocks.used, stats.scheduler.blocks.fenced) == (0, 0)
        assert stats.scheduler.outputs.stale_outputs == 0
        assert not self.probe.prefixes.num_computing
        assert not (self.probe.operations.open or self.probe.operations.effects)

    def audit(self) -> None:
        """Check the consistency of slots, blocks and steps in flight."""
        self.engine.check_integrity()
        slots = self.probe.slots
        assert int(slots.occupied.sum()) <= self.limits.max_num_seqs
        for plan, _ in self.in_flight:
            for back in plan.revocations:
                assert slots.draining[back.slot] and slots.gen[back.slot] == back.gen, "freed before its release"
        free = self.probe.pool.free_blocks()
        for step, blocks in self._touched.items():
            assert not blocks & free, f"step {step} in flight touches free blocks"

    def _padded(self, plan: StepPlan) -> int:
        """Return the maximum tokens of a plan's step including padding; the runner may have fewer drafts."""
        if not len(plan.slots):
            return 0
        widest = int(plan.num_tokens.max())
        widths = range(max(1, widest - self.limits.max_drafts), widest + 1)
        shapes = [self.runner.ops.padded(len(plan.slots), width) for width in widths]
        return max((rows * width for rows, width in filter(None, shapes)), default=0)


class ManualDriver:
    """Drives a runner without a scheduler, with steps that a test defines.

    Builds plans over an engine's runner; slot i owns the blocks [i * n, (i + 1) * n).
    """

    def __init__(self, engine: Engine) -> None:
        self.runner = engine.probe().runner
        self.limits = self.runner.limits
        self._device = make_device(self.runner, 2, "memory")
        self._watchdog = engine.probe().watchdog_seconds
        self._step = 0
        self._gen = 0
        self._gens: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._pending: list[Admission] = []
        self._per_slot = self.limits.num_kv_blocks // self.limits.max_num_seqs

    def admit(self, slot: int, prompt: Sequence[int], **params: object) -> None:
        """Admit a request to a slot in the next step."""
        self._gen += 1
        self._gens[slot] = self._gen
        self._length[slot] = 0
        chosen = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | params))  # type: ignore[arg-type]
        tokens = np.array(prompt, np.int32)
        self._pending.append(Admission(slot, self._gen, tokens, len(prompt), chosen, (), 0))

    def step(
        self, *rows: tuple[int, int] | tuple[int, int, bool] | tuple[int, int, bool, int], back: Sequence[int] = ()
    ) -> tuple[StepOutput, Outcomes]:
        """Compute rows of (slot, tokens[, samples[, drafts]]) and revoke the slots `back`; also return the outcomes."""
        full = [(slot, count, *rest, *(True, 0)[len(rest) :]) for slot, count, *rest in rows]
        admissions, self._pending = tuple(self._pending), []
        width = min(self._per_slot, self.limits.blocks_per_seq)
        plan = plan_of(
            self._step,
            [(slot, self._gens[slot], self._length[slot], own + k, k, samples) for slot, own, samples, k in full],
            admissions=admissions,
            grants=tuple(
                BlockGrant(each.slot, 0, np.arange(width, dtype=np.int32) + each.slot * self._per_slot)
                for each in admissions
            ),
            revocations=tuple(Revocation(slot, self._gens[slot]) for slot in back),
        )
        self._step += 1
        self._device.submit(plan)
        output = self._device.collect(self._watchdog)
        outcomes = read(output.tokens, output.errors)
        for slot, count, samples, _ in full:
            # The last token of a row that samples is computed by the next one.
            self._length[slot] += count + (int(outcomes.counts[slot]) - 1 if samples else 0)
        return output, outcomes

    def close(self) -> None:
        self._device.close()


def parts_of(engine: Engine) -> SchedulerProbe:
    """Return the internals of an engine's scheduler, which must be the built-in one."""
    scheduler = engine.probe().scheduler
    assert isinstance(scheduler, ContinuousBatchingScheduler)
    return scheduler.probe()
