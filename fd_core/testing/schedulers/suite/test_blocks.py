"""Blocks: ownership, sharing and release, protocol 3. The auditor checks most of it in every test of the kit."""

from __future__ import annotations

import msgspec
import pytest

from fd_core.errors import BadRequest
from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.driver import SchedulerTarget, drive, prompt_of
from fd_core.testing.schedulers.suite.test_signals import drains, long_ones, until_one_drains


@pytest.mark.law("3.4")
@pytest.mark.parametrize("depth", [2, 3])
def test_one_victim_is_enough_while_its_blocks_are_fenced(target: SchedulerTarget, depth: int) -> None:
    driver = drive(target, *long_ones(4), depth=depth, caching=False)
    occupancy = until_one_drains(driver, depth)
    name, plan = occupancy.request.name, driver.plans[-1]
    require(len(plan.revocations) == 1, "3.4", f"one block was missing, {len(plan.revocations)} preempted")
    if not occupancy.in_flight:
        lacks("the blocks of a victim are never fenced")
    while drains(driver) == name and occupancy.revoked and driver.occupancy_of(name) is occupancy:
        following = driver.plan() if len(driver.in_flight) < depth else None
        if following is None:
            driver.answer()
        elif driver.occupancy_of(name) is occupancy:
            require(not following.revocations, "3.4", f"another victim, although the blocks of {name} will be freed")
    driver.run(depth)


@pytest.mark.law("3.4")
def test_a_victim_is_not_answered_by_admitting_another(target: SchedulerTarget) -> None:
    """Blocks freed by a preemption must not go to a waiting request, which would be the next victim."""
    specs = [*long_ones(3), *(greedy(f"short{index}", prompt_of(1, index), 1) for index in range(12))]
    driver = drive(target, *specs, max_num_seqs=6)
    driver.run()
    both = [plan.step for plan in driver.plans if plan.revocations and plan.admissions]
    require(not both, "3.4", f"steps {both} preempt and admit at once")


@pytest.mark.law("3.5", "5.3")
def test_equal_blocks_after_other_tokens_share_nothing(target: SchedulerTarget) -> None:
    """The KV of a block depends on all tokens before it; the auditor knows what each block was computed from."""
    target.require("prefix_caching")
    one, other, driver = prompt_of(16), prompt_of(16, 300), drive(target, num_kv_blocks=64)
    for name, prompt in (("end", [*one, *other]), ("begin", [*other, *one]), ("same", [7] * 21), ("longer", [7] * 42)):
        driver.submit(greedy(name, prompt, 2))
        driver.run()


@pytest.mark.law("8")
def test_a_request_that_can_never_run_is_refused_and_holds_nothing(target: SchedulerTarget) -> None:
    driver = drive(target, greedy("there", prompt_of(3), 2))
    done = msgspec.structs.replace(greedy("done", prompt_of(3), 2), delivered=(1, 2))
    for spec in (greedy("there", prompt_of(3), 2), greedy("empty", [], 2), greedy("long", prompt_of(64), 2), done):
        with pytest.raises(BadRequest):
            driver.scheduler.add(spec)
        driver.audit()
    driver.run()
    driver.check_policy()


@pytest.mark.law("3.3")
def test_the_tail_of_a_prefix_is_evicted_before_its_head(target: SchedulerTarget) -> None:
    """Of a prompt of ten blocks, another prompt evicts two: the other eight are of no use without the first one."""
    target.require("prefix_caching")
    prompt = prompt_of(40)
    driver = drive(target, greedy("first", prompt, 1), max_num_batched_tokens=64)
    driver.run()
    driver.submit(greedy("other", prompt_of(30, 500), 1))
    driver.run()
    driver.submit(greedy("again", prompt, 1))
    computed = driver.must_plan().total_tokens
    require(computed <= 24, "3.3", f"after 2 of its 10 blocks were evicted, {computed} of 40 tokens are computed again")
    driver.run()


@pytest.mark.law("3.3")
def test_the_prefix_that_was_used_last_stays(target: SchedulerTarget) -> None:
    target.require("prefix_caching")
    used, unused = prompt_of(16), prompt_of(16, 300)
    driver = drive(target, max_num_batched_tokens=64)
    for name, prompt in (("used", used), ("unused", unused), ("used again", used), ("large", prompt_of(40, 500))):
        driver.submit(greedy(name, prompt, 1))
        driver.run()
    driver.submit(greedy("used once more", used, 1))
    computed = driver.must_plan().total_tokens
    require(computed <= 4, "3.3", f"a prompt that was used last is evicted first: {computed} tokens are computed again")
    driver.run()


@pytest.mark.law("2.1", "3.5")
def test_preempted_requests_return_with_the_kv_that_is_left(target: SchedulerTarget) -> None:
    """They return after a pause, which took no blocks from them."""
    target.require("prefix_caching")
    driver = drive(target, *long_ones(3, 30), num_kv_blocks=64)
    driver.run_until(lambda: sum(map(len, driver.texts.tokens.values())) >= 30)
    driver.pause()
    tokens = {name: len(request.tokens) for name, request in driver.auditor.requests.items() if request.preempted}
    if not tokens:
        lacks("the scheduler cannot pause")
    driver.run()
    for name, count in tokens.items():
        computed = driver.computed_before(name)[-1]
        least = (count - 1) // driver.limits.block_size * driver.limits.block_size
        what = f"{name} returned with {count} tokens, of which {least} were cached"
        require(computed >= least, "2.1", f"{what}, and began at {computed}")
