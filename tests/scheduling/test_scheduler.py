"""What a plan contains: budget, room, admission and take-backs."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.config import Limits
from fd_core.errors import BadRequest
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.drafts import DraftControl
from fd_core.scheduling.policies import Fcfs, Policy, Priority
from fd_core.scheduling.scheduler import Scheduler
from fd_core.scheduling.victims import Youngest
from fd_core.types import FinishReason, RequestSpec, SamplingParams, StepPlan

HASHER = PrefixHasher(block_size=4, identity="m")


def scheduler(policy: Policy | None = None, hasher: PrefixHasher | None = None, **changes: int) -> Scheduler:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "block_size": 4,
        "num_kv_blocks": 20,
        "vocab_size": 100,
    }
    made = Scheduler(Limits(**(values | changes)), policy or Fcfs(), Youngest(), hasher)
    made._forecast.share = 0.0  # nothing is kept in reserve, so that shortages come soon
    return made


def spec(name: str, length: int = 6, max_tokens: int = 8, priority: int = 0, first: int = 0) -> RequestSpec:
    return RequestSpec(
        request_id=name,
        prompt=tuple(range(first, first + length)),
        params=SamplingParams(max_tokens=max_tokens),
        priority=priority,
    )


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    assert plan.total_tokens <= scheduler.limits.max_num_batched_tokens
    return plan


def answer(scheduler: Scheduler, plan: StepPlan, token: int = 50) -> None:
    """Apply the least that a healthy output would."""
    table = scheduler.slots
    for row, slot in enumerate(plan.slots.tolist()):
        if plan.samples[row]:
            table.tokens[slot, table.known[slot]] = token
            table.known[slot] += 1
    scheduler.settle(plan.slots.astype(np.intp), plan.starts + plan.num_tokens)
    scheduler.answered(plan.step)
    for back in plan.revocations:
        scheduler.released(back.slot)


def test_an_idle_scheduler_has_no_plan() -> None:
    assert scheduler().plan() is None


def test_prefill_is_chunked_to_the_budget_and_samples_only_at_its_end() -> None:
    s = scheduler(max_num_batched_tokens=4)
    s.add(spec("a", length=10))
    chunks = []
    for _ in range(3):
        plan = planned(s)
        chunks.append((plan.starts.tolist(), plan.num_tokens.tolist(), plan.samples.tolist()))
        answer(s, plan)
    assert chunks == [([0], [4], [False]), ([4], [4], [False]), ([8], [2], [True])]


def test_decodes_come_before_prefills() -> None:
    s = scheduler(max_num_batched_tokens=8)
    s.add(spec("a"))
    answer(s, planned(s))
    s.add(spec("b", length=20))
    plan = planned(s)
    assert plan.num_tokens.tolist() == [1, 7]


def test_a_budget_equal_to_the_decode_demand_serves_decodes_and_an_unfinished_prefill_in_turn() -> None:
    s = scheduler(max_num_batched_tokens=2)
    s.add(spec("a", length=1, max_tokens=20))
    answer(s, planned(s))
    s.add(spec("b", length=12))
    answer(s, planned(s))
    s.limits = Limits(
        **{name: getattr(s.limits, name) for name in s.limits.__struct_fields__} | {"max_num_batched_tokens": 1}
    )
    served = []
    for _ in range(6):
        plan = planned(s)
        served += plan.slots.tolist()
        answer(s, plan)
    assert served.count(0) == served.count(1) == 3


def test_the_smallest_budget_makes_progress() -> None:
    s = scheduler(max_num_batched_tokens=1)
    s.add(spec("a", length=3, max_tokens=4))
    for _ in range(6):
        answer(s, planned(s))
    assert s.slots.known[0] == 3 + 4


def test_a_request_that_was_aborted_in_the_same_pass_is_not_charged() -> None:
    s = scheduler()
    s.add(spec("a"))
    answer(s, planned(s))
    s.abort("a")
    plan = planned(s)
    assert (plan.total_tokens, [back.slot for back in plan.revocations]) == (0, [0])


def test_a_take_back_happens_even_when_no_budget_is_left() -> None:
    s = scheduler(max_num_batched_tokens=2)
    for name in "abc":
        s.add(spec(name, length=1))
    answer(s, planned(s))
    s.abort("b")
    s.add(spec("d", length=10))
    plan = planned(s)
    assert [back.slot for back in plan.revocations] == [1]
    assert plan.total_tokens == 2


def test_blocks_running_out_takes_back_the_youngest_only() -> None:
    s = scheduler(num_kv_blocks=10, max_num_seqs=3)
    for index, name in enumerate("abc"):
        s.add(spec(name, length=4, max_tokens=30, first=10 * index))
    victims: list[int] = []
    while not victims:
        plan = planned(s)
        victims = [back.slot for back in plan.revocations]
        assert not (victims and plan.admissions), "a pass that preempted admits nobody"
        answer(s, plan)
    assert victims == [2]
    s.check_integrity()


def test_blocks_that_are_fenced_are_waited_for_before_another_victim_is_taken() -> None:
    s = scheduler(num_kv_blocks=10, max_num_seqs=3, pipeline_depth=2)
    for index, name in enumerate("abc"):
        s.add(spec(name, length=4, max_tokens=30, first=10 * index))
    in_flight = [planned(s)]
    taken = 0
    for _ in range(40):
        plan = s.plan()
        if plan is not None:
            in_flight.append(plan)
            taken += len(plan.revocations)
            if taken:
                break
        if len(in_flight) > 1 or plan is None:
            answer(s, in_flight.pop(0))
    assert taken == 1
    assert s.pool.num_fenced > 0, "the step in flight still touches the victim's blocks"
    while in_flight:
        answer(s, in_flight.pop(0))
    s.check_integrity()


def test_priority_goes_first_and_is_taken_back_last() -> None:
    s = scheduler(Priority(), max_num_seqs=1)
    s.add(spec("low", priority=5))
    s.add(spec("high", priority=-1))
    plan = planned(s)
    occupant = s.slots.requests[int(plan.slots[0])]
    assert occupant is not None
    assert occupant.spec.request_id == "high"


def test_a_cached_prefix_is_not_charged_but_the_last_token_always_is() -> None:
    s = scheduler(hasher=HASHER)
    s.add(spec("a", length=8))
    answer(s, planned(s))
    s.add(spec("b", length=8))
    plan = planned(s)
    row = plan.slots.tolist().index(1)
    assert (plan.starts[row], plan.num_tokens[row]) == (4, 4)


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(BadRequest, match=r"40 tokens.*at most 40"):
        scheduler().add(spec("a", length=40))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match="no tokens"):
        scheduler().add(spec("a", length=0))


def test_a_new_stay_is_not_charged_for_the_drafts_of_the_one_before() -> None:
    s = scheduler(max_num_seqs=1, max_drafts=3)
    s.drafts = DraftControl(1, 3, cheap_tokens=100)
    s.add(spec("a", length=1, max_tokens=8))
    first = planned(s)
    s.drafts_are_ready(np.array([3], np.int32), first.step)
    s.finish(0, FinishReason.STOP)
    s.answered(first.step)
    s.add(spec("b", length=1, max_tokens=8, first=50))
    s.plan()
    assert s.slots.drafts_ready.tolist() == [0]


def test_blocks_come_free_with_the_answer_to_the_last_step_that_touches_them() -> None:
    s = scheduler(num_kv_blocks=10, pipeline_depth=2)
    s.add(spec("a", length=6))
    steps = [planned(s), planned(s)]
    s.abort("a")
    planned(s)
    free = []
    for plan in steps:
        free.append(s.pool.num_free)
        s.answered(plan.step)
    assert [*free, s.pool.num_free] == [8, 8, 10]


def test_a_prefix_that_matched_is_not_evicted_to_make_room_behind_it() -> None:
    s = scheduler(hasher=HASHER, num_kv_blocks=10, max_num_batched_tokens=32)
    s.add(spec("a", length=17, max_tokens=1))
    answer(s, planned(s))
    s.finish(0, FinishReason.LENGTH)
    assert (s.pool.num_cached, s.pool.num_free) == (4, 10)
    s.add(spec("other", length=23, first=50))
    s.add(spec("again", length=19))
    plan = planned(s)
    assert len(plan.admissions) == 1, "nothing but its own prefix is left for the second one, so it waits"
    assert s.pool.num_cached == 4
    s.check_integrity()


def test_a_request_waits_for_its_release_before_it_may_return() -> None:
    s = scheduler(num_kv_blocks=10, max_num_seqs=3, pipeline_depth=2)
    for index, name in enumerate("abc"):
        s.add(spec(name, length=4, max_tokens=30, first=10 * index))
    in_flight: list[StepPlan] = []
    while not (in_flight and in_flight[-1].revocations):
        if len(in_flight) == 2:
            answer(s, in_flight.pop(0))
        if (plan := s.plan()) is not None:
            in_flight.append(plan)
    assert (s.num_running, s.num_draining, len(s.waiting)) == (2, 1, 0)
    while in_flight:
        answer(s, in_flight.pop(0))
    assert (s.num_draining, len(s.waiting)) == (0, 1)
