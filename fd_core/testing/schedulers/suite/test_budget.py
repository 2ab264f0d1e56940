"""Budget: the step token budget, protocol 2, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.policies import FairShare, Priority
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.driver import Driver, SchedulerTarget, drive, prompt_of
from fd_core.testing.schedulers.tiers import OperationEnd
from fd_core.types import RequestSpec

KS = [0, 1, 3, 5, 16]


def decoding(count: int, max_tokens: int = 30) -> list[RequestSpec]:
    """Return requests with prompts of one token."""
    return [greedy(f"r{index}", prompt_of(1, index), max_tokens) for index in range(count)]


def until_all_decode(driver: Driver, count: int) -> None:
    """Step until `count` requests decode and have delivered tokens, with nothing in flight."""
    reached = driver.run_until(lambda: not driver.in_flight and len(driver.texts.tokens) == count)
    require(reached, "2.1", f"{count} requests that fit do not decode concurrently")


@pytest.mark.law("2", "2.1")
@pytest.mark.parametrize("k", KS)
def test_a_budget_equal_to_the_demand_plans_the_whole_demand(target: SchedulerTarget, k: int) -> None:
    """All drafts are correct, so every request has k of them in every step."""
    budget = 4 * (1 + k)
    # With small blocks, drafts may be limited by the blocks that a row can grow by in one step.
    room: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4 if k < 8 else 32}
    driver = drive(target, *decoding(4, 60), k=k, max_num_batched_tokens=budget, **room)
    until_all_decode(driver, 4)
    plan = driver.plan()
    total = 0 if plan is None else plan.total_tokens
    what = f"four decodes with {k} drafts each fill the budget of {budget}; the plan computes {total}"
    require(total == budget, "2.1", what)
    driver.run()


@pytest.mark.law("2.1")
@pytest.mark.parametrize(("stages", "depth", "count"), [(1, 2, 3), (1, 4, 3), (2, 2, 2), (4, 4, 8), (4, 4, 64)])
def test_steps_are_planned_while_others_are_in_flight(
    target: SchedulerTarget, stages: int, depth: int, count: int
) -> None:
    """Otherwise the device waits for the host after each step, or a stage for the others."""
    room: dict[str, Any] = {"max_num_seqs": max(count, 4), "num_kv_blocks": 16 * count + 16}
    room["max_num_batched_tokens"] = count + 8
    driver = drive(target, *decoding(count), depth=depth, num_stages=stages, **room)
    until_all_decode(driver, count)
    driver.fill(depth)
    planned, rows = len(driver.in_flight), [len(answer.plan.slots) for answer in driver.in_flight]
    what = (
        f"{depth} steps of {stages} stages may be in flight, and it plans {planned}, of {rows} of the {count} requests"
    )
    # With stages, a request is in one plan at a time: each has a share, which need not be an equal one.
    whole = rows == [count] * depth if stages == 1 else planned == depth and max(rows) <= 2 * count // depth
    require(whole, "2.1", f"{what} that decode")
    driver.run(depth)


@pytest.mark.law("2.1")
def test_more_requests_run_at_once_than_eight_bits_count(target: SchedulerTarget) -> None:
    most = target.envelope.max_num_seqs or 300
    if most <= 257:
        lacks(f"its envelope ends at {most} slots")
    room: dict[str, Any] = {"max_num_seqs": min(most, 300), "num_kv_blocks": 700, "max_num_batched_tokens": 1000}
    driver, running = drive(target, *decoding(300, 4), **room), list[int]()
    try:
        driver.run(watch=lambda _: running.append(len(driver.auditor.occupancies)))
    except (OverflowError, IndexError) as error:
        broken("2.1", f"it fails where {room['max_num_seqs']} requests fit: {error}")
    require(max(running) > 257, "2.1", f"of {room['max_num_seqs']} requests that fit, {max(running)} run at once")


@pytest.mark.law("2.1")
def test_requests_that_arrive_one_by_one_run_at_once(target: SchedulerTarget) -> None:
    """The budget and the blocks suffice for all of them, to the last token: each is in the next plan.

    If it admits none while others run, those that waited run at once after the first one.
    """
    slots, late = min(target.envelope.max_num_seqs or 16, 16), list[str]()
    specs = [greedy(f"r{index}", prompt_of(1 + index % 2, index), 40) for index in range(16)]
    driver = drive(target, max_num_seqs=slots, num_kv_blocks=200, max_num_batched_tokens=slots + 8)
    for at, spec in enumerate(specs):
        driver.submit(spec)
        driver.step()
        late += [spec.request_id] if 0 < at < slots and spec.request_id not in driver.first_plan else []
    if late and len(late) < slots - 1:
        broken("2.2", f"of {slots} requests that arrive in as many steps and fit, the next plan does not admit {late}")
    for _ in range(4):
        driver.step()
    if len(driver.auditor.live) == 1:
        driver.run_until(lambda: driver.texts.ends)
        slots = min(slots, 15)
        for _ in range(4):
            driver.step()
    running = len(driver.auditor.live)
    require(
        running == slots, "2.1", f"of 16 requests that arrive in as many steps, of which {slots} fit, {running} run"
    )
    driver.run()


@pytest.mark.law("2.2")
def test_drafts_that_are_rejected_become_fewer(target: SchedulerTarget) -> None:
    """`DraftControl` lowers the number of drafts of a request; a rejected draft costs as much as a token."""
    driver, counts = drive(target, *decoding(2, 60), k=5, wrong=1.0, num_kv_blocks=64), list[int]()
    driver.run(watch=lambda plan: counts.append(int(plan.num_drafts.sum())))
    first, last = sum(counts[:20]), sum(counts[-20:])
    require(2 * last <= first, "2.2", f"all drafts are wrong; 20 plans have {first} at first, and {last} at last")


@pytest.mark.law("2.2", "5.2")
@pytest.mark.parametrize("budget", [1, 2, 4])
def test_decodes_are_left_out_in_rotation(target: SchedulerTarget, budget: int) -> None:
    """Six requests with loaded KV decode at once, more than the budget allows."""
    target.require("storage")
    prompts = [prompt_of(9, index) for index in range(6)]
    room: dict[str, Any] = {
        "max_num_seqs": 6,
        "num_kv_blocks": 24,
        "max_model_len": 96,
        "max_num_batched_tokens": budget,
    }
    driver = drive(target, keep=OffloadSelection(True, True, True), **room)
    for index, prompt in enumerate([*prompts, prompt_of(94, 100)]):  # the last one evicts the others
        driver.submit(greedy(f"before{index}", prompt, 1))
        driver.run()
    driver.submit(*(greedy(f"r{index}", prompt, 6) for index, prompt in enumerate(prompts)))
    for _ in range(100):
        if len(driver.auditor.live) == 6:
            break
        driver.plan()
        driver.answer_all()
        while driver.tiers.pending:
            driver.complete(0, OperationEnd.WELL)
    if len(driver.auditor.live) < 6:
        lacks("the scheduler never runs more requests than the budget allows")
    counts = np.zeros(6, int)
    for _ in range(12 // budget):
        plan = driver.must_plan()
        counts[plan.slots] += 1
        driver.answer()
    turns = 12 // budget // -(-6 // budget)
    require(counts.min() >= turns, "2.2", f"with a budget of {budget} the slots decode {counts.tolist()} times")
    driver.run()


@pytest.mark.law("2.3")
@pytest.mark.parametrize("k", [0, 3])
def test_budget_of_an_aborted_request_goes_to_others(target: SchedulerTarget, k: int) -> None:
    specs = [*decoding(3), greedy("long", prompt_of(56, 9), 2)]
    budget = 3 * (1 + k) + 2
    driver = drive(target, *specs, k=k, num_kv_blocks=64, max_num_batched_tokens=budget)
    driver.run_until(lambda: not driver.in_flight and len(driver.texts.tokens) == 3)
    occupancy = driver.occupancy_of("long")
    require(
        occupancy is not None and occupancy.remaining > budget,
        "2.1",
        "the long prompt is not prefilled with the others",
    )
    driver.abort("r0")
    plan = driver.must_plan()
    total = plan.total_tokens
    require(total == budget, "2.3", f"r0 left, and the plan computes {total} of {budget} tokens")
    driver.run()


@pytest.mark.law("2.2", "2.4")
@pytest.mark.parametrize("scarce", ["blocks", "budget"])
def test_everybody_gets_a_first_token_while_others_keep_coming(target: SchedulerTarget, scarce: str) -> None:
    """A prompt that needs most of the pool, or the budget of several steps, must not be starved by short ones."""
    length, output, room = 3, 6, dict[str, Any]()
    if scarce == "budget":
        length, output, room = 8, 1, {"num_kv_blocks": 64, "max_num_batched_tokens": 8}
    driver = drive(target, *decoding(3, 6), **room)
    driver.step()
    driver.submit(greedy("large", prompt_of(48, 500), 4))
    for number in range(400):
        if "large" in driver.texts.tokens:
            break
        driver.submit(greedy(f"more{number}", prompt_of(length, number), output))
        driver.step()
    what = "the large prompt got no token in 400 steps, with a new short prompt in each"
    require("large" in driver.texts.tokens, "2.2", what)
    driver.run()


@pytest.mark.law("8")
@pytest.mark.parametrize("waits_for", ["nothing", "grammars", "some_grammars", "lookups"])
def test_policy_determines_the_next_admission(target: SchedulerTarget, waits_for: str) -> None:
    """The order of ready requests does not depend on what they waited for."""
    if waits_for == "lookups":
        target.require("storage")
    every = {"grammars": 1, "some_grammars": 2}.get(waits_for, 10)
    specs = [
        greedy(
            f"r{index}",
            prompt_of(9, index),
            3,
            priority=(7 * index) % 5,
            grammar=f"start: /{index}/" if index and not index % every else None,
        )
        for index in range(5)
    ]
    keep = OffloadSelection(True, True, True) if waits_for == "lookups" else None
    driver = drive(target, *specs, policy=Priority(), max_num_seqs=1, keep=keep)
    while driver.tiers.pending:
        driver.complete(0, OperationEnd.WELL)
    driver.run()
    order = list(driver.first_plan)
    right = [spec.request_id for spec in sorted(specs, key=lambda spec: spec.priority)]
    require(order == right, "8", f"expected the policy's order {right}, got {order}")


@pytest.mark.law("2.2")
def test_tenant_with_few_requests_waits_for_few_of_another(target: SchedulerTarget) -> None:
    """Under `fair`, the requests of a second tenant take turns with the many that arrived before them."""
    driver = drive(target, policy=FairShare(), max_num_seqs=2)
    driver.submit(*(greedy(f"many{index}", prompt_of(4, index), 4, tenant="many") for index in range(40)))
    driver.step()
    driver.submit(*(greedy(f"few{index}", prompt_of(4, 100 + index), 4, tenant="few") for index in range(3)))
    driver.run()
    order = list(driver.first_plan)
    last = order.index("few2")
    require(last < 12, "2.2", f"the third request of the tenant with few is number {last} of {len(order)}")
