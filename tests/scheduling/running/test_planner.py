"""Plans of steps that are in flight at the same time."""

from __future__ import annotations

import pytest

from fd_core.config import Limits
from fd_core.scheduling.contract import SchedulerSetup
from fd_core.scheduling.policies import Fcfs
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import FewestTokens
from fd_core.types import RequestSpec, SamplingParams
from tests.scheduling.driving import add, next_plan, planned

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32, block_size=4, num_kv_blocks=32, vocab_size=64
)


@pytest.fixture
def scheduler() -> ContinuousBatchingScheduler:
    return ContinuousBatchingScheduler(SchedulerSetup(limits=LIMITS, policy=Fcfs(), victims=FewestTokens()))


def spec(name: str, max_tokens: int) -> RequestSpec:
    return RequestSpec(request_id=name, prompt=(1, 2, 3), params=SamplingParams(max_tokens=max_tokens))


@pytest.mark.law("4")
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 29])
def test_planning_stops_at_last_token_of_request(scheduler: ContinuousBatchingScheduler, max_tokens: int) -> None:
    add(scheduler, spec("one", max_tokens))
    plans = [planned(scheduler) for _ in range(max_tokens)]
    assert [int(plan.starts[0]) for plan in plans] == [0, *range(3, 2 + max_tokens)]
    assert next_plan(scheduler) is None, "every token is planned, none delivered yet"


@pytest.mark.law("4")
def test_fully_planned_request_leaves_later_plans(scheduler: ContinuousBatchingScheduler) -> None:
    short, long = add(scheduler, spec("short", 3)), add(scheduler, spec("long", 9))
    plans = [planned(scheduler) for _ in range(9)]
    assert [short.slot in plan.slots for plan in plans] == [True] * 3 + [False] * 6
    assert all(long.slot in plan.slots for plan in plans)
    assert next_plan(scheduler) is None


def test_new_request_joins_plan_of_decoding_batch(scheduler: ContinuousBatchingScheduler) -> None:
    first = add(scheduler, spec("first", 9))
    for _ in range(3):
        planned(scheduler)
    second = add(scheduler, spec("second", 9))
    plan = planned(scheduler)
    assert plan.slots.tolist() == [first.slot, second.slot] and plan.num_tokens.tolist() == [1, 3]
    assert planned(scheduler).num_tokens.tolist() == [1, 1]


def test_each_decoding_slot_gets_its_block_when_its_last_one_is_full(scheduler: ContinuousBatchingScheduler) -> None:
    requests = [add(scheduler, spec(name, 20)) for name in ("one", "two")]
    planned(scheduler)
    requests.append(
        add(scheduler, RequestSpec(request_id="three", prompt=(1,) * 6, params=SamplingParams(max_tokens=20)))
    )
    slots = scheduler.probe().slots
    for _ in range(18):
        plan = planned(scheduler)
        for request in requests:
            computed, blocks = int(slots.num_computed[request.slot or 0]), int(slots.num_blocks[request.slot or 0])
            assert computed <= blocks * LIMITS.block_size < computed + 2 * LIMITS.block_size
        assert all(len(grant.blocks) for grant in plan.grants)
