"""A scheduler in hostile orders, beside the auditor and the golden texts."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fd_core.scheduling.operations.kv_offloading import KeepKV
from fd_core.testing.schedulers.audit import WHERES
from fd_core.testing.schedulers.driver import Driver, SchedulerTarget, drive
from fd_core.testing.schedulers.scripts import PROMPTS, many_specs
from fd_core.testing.schedulers.tiers import OperationEnd, elsewhere, job_for
from fd_core.testing.stepping import SMALL
from fd_core.types import RequestSpec

_KEPT = [None, KeepKV(), KeepKV(True, True, True), KeepKV(False, True, True)]
_ENDS = [OperationEnd.WELL, OperationEnd.WELL, OperationEnd.IN_PART, OperationEnd.BADLY]


class HostileOrders(RuleBasedStateMachine):
    """Rules are biased to pressure: requests come in bunches, and are aborted in the middle of their work."""

    target: SchedulerTarget
    paired = False
    """Whether other workers compute most prompts, and have some computed here."""

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
        keep: KeepKV | None,
    ) -> None:
        self.depth = depth
        self.unused = _paired_specs() if self.paired else list(many_specs())
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
        """Some steps as an engine makes them."""
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
        if not hasattr(self, "driver"):
            return
        self.driver.run(self.depth)


def _paired_specs() -> list[RequestSpec]:
    found = [elsewhere(spec)[0] if index % 5 else spec for index, spec in enumerate(many_specs())]
    jobs = [job_for(f"job{index}", PROMPTS[index // 2][: 5 + 3 * index], index % 3) for index in range(4)]
    return [*found[::2], *jobs, *found[1::2]]


def run_hostile_orders(target: SchedulerTarget, examples: int, *, paired: bool = False) -> None:
    """Drive a scheduler through `examples` random sequences of calls."""
    run_state_machine_as_test(
        type("HostileOrdersOf", (HostileOrders,), {"target": target, "paired": paired}),
        settings=settings(
            max_examples=examples,
            # The rule is named in any case, and a search for fewer calls takes minutes.
            phases=[Phase.explicit, Phase.generate],
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
