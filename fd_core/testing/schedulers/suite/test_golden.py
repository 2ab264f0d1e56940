"""Golden: every request gets its expected text for any order of calls, protocols 1 to 4."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.testing.kit.law import require
from fd_core.testing.models.small import SMALL
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.audit import WHERES
from fd_core.testing.schedulers.driver import Driver, SchedulerTarget, drive, prompt_of
from fd_core.testing.schedulers.scripts import PROMPTS, many_specs, whole_text
from fd_core.testing.schedulers.tiers import OperationEnd, elsewhere, job_for
from fd_core.types import FinishReason, Pooling


@pytest.mark.law("1.1", "4")
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("k", [0, 3, 5])
def test_text_ends_at_its_stop_despite_later_drafts(target: SchedulerTarget, k: int, logprobs: int | None) -> None:
    """End at the limit, at a stop token, and at a stop token at the limit."""
    specs, stopped = [], []
    for index, length in enumerate((1, 2, 3, 4, 5, 6, 7)):
        plain = greedy(f"limit{index}", prompt_of(5, index), length, logprobs=logprobs)
        text = whole_text(plain)
        specs.append(plain)
        if text[-1] not in text[:-1]:
            for more in (0, 3):
                name, stop = f"stop{index}+{more}", (text[-1],)
                specs.append(greedy(name, plain.prompt, length + more, logprobs=logprobs, stop_token_ids=stop))
                stopped.append(name)
    driver = drive(target, *specs, k=k, known=[greedy("on", each.prompt, 20) for each in specs[::3]], depth=2)
    driver.run(2)
    for name, end in driver.texts.ends.items():
        right = FinishReason.STOP if name in stopped else FinishReason.LENGTH
        require(end is right, "1.1", f"{name}: expected end {right}, got {end}")


@pytest.mark.law("4")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [5, 24])
def test_prompt_outputs_are_computed_despite_cached_kv(target: SchedulerTarget, budget: int, depth: int) -> None:
    """Score and pool cached prompts in chunks, interleaved and with preemption."""
    prompts = [[*prompt_of(20), *prompt_of(length, 1)] for length in (0, 1, 6, 12)]
    known = [greedy(f"known{index}", prompt, 30) for index, prompt in enumerate(prompts)]
    driver = drive(target, *known[:2], depth=depth, max_num_batched_tokens=budget)
    driver.run(depth)
    for index, prompt in enumerate(prompts):
        scored = greedy(f"scored{index}", prompt, 30, prompt_logprobs=index)
        mean = greedy(f"mean{index}", prompt, 1)
        driver.submit(known[index], scored) if index > 1 else driver.submit(scored)
        driver.submit(msgspec.structs.replace(mean, pooling=Pooling("mean")))
        driver.step(depth)
    driver.run(depth)


_KEPT = [None, OffloadSelection(), OffloadSelection(True, True, True), OffloadSelection(False, True, True)]
_ENDS = [OperationEnd.WELL, OperationEnd.WELL, OperationEnd.IN_PART, OperationEnd.BADLY]


class HostileOrders(RuleBasedStateMachine):
    """Random calls biased towards pressure: requests arrive in bursts, and are aborted while running."""

    target: SchedulerTarget
    paired = False
    """True if other workers compute most prompts, and delegate some to this one."""

    @initialize(
        depth=st.integers(1, 3),
        slots=st.integers(2, 6),
        extra_budget=st.sampled_from([40, 20, 8, 3, 1, 0]),
        extra_blocks=st.sampled_from([0, 0, 1, 4, 12]),
        k=st.sampled_from([0, 1, 3, 5]),
        wrong=st.sampled_from([0.0, 0.3, 1.0]),
        caching=st.booleans(),
        keep=st.sampled_from(_KEPT),
    )
    def start(
        self,
        depth: int,
        slots: int,
        extra_budget: int,
        extra_blocks: int,
        k: int,
        wrong: float,
        caching: bool,
        keep: OffloadSelection | None,
    ) -> None:
        self.depth = depth
        self.unused = list(many_specs())
        if self.paired:
            far = [elsewhere(spec)[0] if index % 5 else spec for index, spec in enumerate(self.unused)]
            jobs = [job_for(f"job{index}", PROMPTS[index // 2][: 5 + 3 * index], index % 3) for index in range(4)]
            self.unused = [*far[::2], *jobs, *far[1::2]]
        self.driver: Driver = drive(
            self.target,
            k=k,
            wrong=wrong,
            caching=caching or self.paired,
            paired=self.paired,
            keep=keep if caching else None,
            depth=depth,
            known=self.unused if k else (),
            max_num_seqs=slots,
            max_num_batched_tokens=1 + k + extra_budget,
            num_kv_blocks=SMALL["num_kv_blocks"] + extra_blocks,
        )

    @precondition(lambda self: self.unused)
    @rule(data=st.data(), count=st.integers(3, 7))
    def submit(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.unused))):
            self.driver.submit(self.unused.pop(data.draw(st.integers(0, len(self.unused) - 1))))

    @rule(times=st.integers(3, 16))
    def fill_the_pipeline_and_answer(self, times: int) -> None:
        """Execute some steps like an engine."""
        for _ in range(times):
            self.driver.step(self.depth)

    @precondition(lambda self: len(self.driver.in_flight) < self.depth)
    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def answer(self) -> None:
        self.driver.answer()

    @precondition(lambda self: self.driver.in_flight and len(self.driver.in_flight[0].plan.slots) > 1)
    @rule(data=st.data())
    def answer_with_a_row_that_failed(self, data: st.DataObject) -> None:
        self.driver.answer(data.draw(st.sampled_from(self.driver.in_flight[0].plan.slots.tolist())))

    @precondition(lambda self: self.driver.in_flight)
    @rule(epoch=st.sampled_from([-1, 0, 1]), step=st.sampled_from([-1, 1, 7]))
    def answer_of_another_life(self, epoch: int, step: int) -> None:
        plan = self.driver.in_flight[0].plan
        self.driver.answer_stale(epoch=plan.epoch + epoch, step=plan.step + step)

    @precondition(lambda self: self.driver.auditor.requests)
    @rule(data=st.data(), where=st.sampled_from(WHERES))
    def abort(self, data: st.DataObject, where: str) -> None:
        names = sorted(name for name, each in self.driver.auditor.requests.items() if each.where == where)
        if len(names) < (3 if where in ("waits", "runs") else 1):
            return
        name = data.draw(st.sampled_from(names))
        for _ in range(data.draw(st.integers(1, 2))):
            self.driver.abort(name)

    @precondition(lambda self: self.driver.tiers.pending)
    @rule(data=st.data(), how=st.sampled_from(_ENDS))
    def end_an_operation(self, data: st.DataObject, how: OperationEnd) -> None:
        self.driver.complete(data.draw(st.integers(0, len(self.driver.tiers.pending) - 1)), how)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run(self.depth)


def run_hostile_orders(target: SchedulerTarget, examples: int, *, paired: bool = False) -> None:
    """Drive a scheduler through `examples` random sequences of calls."""
    run_state_machine_as_test(
        type("HostileOrdersOf", (HostileOrders,), {"target": target, "paired": paired}),
        settings=settings(
            max_examples=examples,
            # The failure names its rule, and shrinking takes minutes.
            phases=[Phase.explicit, Phase.generate],
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.law("1.1", "1.2", "1.3", "1.4", "1.5", "1.7", "2.1", "2.2", "3.1", "3.2", "3.5", "3.6", "4")
def test_hostile_orders(target: SchedulerTarget, examples: int) -> None:
    run_hostile_orders(target, examples)
