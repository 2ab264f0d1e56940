"""Blocks: ownership, sharing and release, protocol 3. The auditor checks most of it in every test of the kit."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.law("2.1", "3.3", "5.3")
@pytest.mark.parametrize("system", [7, 900])
def test_conversations_are_computed_from_their_last_turn_on(target: SchedulerTarget, system: int) -> None:
    """Four users take turns at once, in a pool with room for all: each prompt is the last one, its answer and more.

    The events name all of it, so that a router sends each turn to the engine of the last one.
    """
    target.require("prefix_caching")
    size, begun = 16, list(range(3, 3 + system))
    room: dict[str, Any] = {"num_kv_blocks": 1000, "max_num_batched_tokens": 1200, "max_model_len": 2000}
    room["max_num_seqs"] = min(target.envelope.max_num_seqs or 4, 4)
    driver = drive(target, greedy("system", [*begun, 250], 1), block_size=size, setup={"kv_events": True}, **room)
    driver.run()
    texts, known = {user: [*begun, user] for user in range(4)}, dict.fromkeys(range(4), system // size)
    for turn in range(3):
        for user, text in texts.items():
            text += prompt_of(21, 10 * turn + user)
        driver.submit(*(greedy(f"user {user} turn {turn}", text, 20) for user, text in texts.items()))
        driver.run()
        for user, text in texts.items():
            name = f"user {user} turn {turn}"
            computed = len(text) - driver.computed_before(name)[0]
            most = len(text) - size * known[user]
            what = f"turn {turn} of a conversation has {len(text)} tokens, of which {size * known[user]} are cached"
            require(computed <= most, "2.1", f"{what}, and {computed} are computed, expected at most {most}")
            text += driver.texts.tokens[name]
            known[user] = (len(text) - 1) // size  # the last token has no KV


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
