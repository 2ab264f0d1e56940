"""Signals: preempted-slot signalling, protocol 1, in fixed scenarios."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID, MalformedOutput
from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.audit import Occupancy
from fd_core.testing.schedulers.driver import Driver, SchedulerTarget, drive
from fd_core.testing.schedulers.scripts import PROMPTS
from fd_core.types import RequestSpec


def long_ones(count: int, max_tokens: int = 44) -> list[RequestSpec]:
    """Return requests, each of which nearly fills the pool of a small engine."""
    return [greedy(f"r{index}", PROMPTS[index][:8], max_tokens) for index in range(count)]


def drains(driver: Driver) -> str | None:
    """Return the preempted request that is not released."""
    names = [
        occupancy.request.name
        for occupancy in driver.auditor.occupancies.values()
        if occupancy.revoked and occupancy.request.end is None
    ]
    return names[0] if names else None


def until_one_drains(driver: Driver, depth: int) -> Occupancy:
    """Step until a request is preempted, with that plan in flight; skip the test if none ever is."""
    driver.run_until(lambda: drains(driver), depth)
    occupancy = driver.occupancy_of(drains(driver) or lacks("the scheduler preempts nobody here"))
    assert occupancy is not None
    return occupancy


@pytest.mark.law("1.5")
@pytest.mark.parametrize("aborted", [False, True])
def test_a_row_of_another_gen_is_dropped(target: SchedulerTarget, *, aborted: bool) -> None:
    """Deliver tokens, or the acknowledgement of an abort, to a request of another gen."""
    driver = drive(target, *long_ones(2, 8))
    driver.run_until(lambda: len(driver.texts.tokens) == 2)
    driver.answer_all()
    if aborted:
        driver.abort(driver.auditor.live[0].request.name)
    assert driver.plan() is not None
    answer = driver.in_flight.popleft()
    gens = answer.output.gens.copy()
    slot = answer.plan.revocations[0].slot if aborted else int(answer.plan.slots[0])
    gens[slot] += 1
    deltas, _ = driver.scheduler.commit(answer.plan, replace(answer.output, gens=gens))
    name = driver.auditor.occupancies[slot].request.name
    told = [delta for delta in deltas if delta.request_id == name]
    require(not told, "1.5", f"{name} got {told}, which the runner computed for another gen")
    require(len(deltas) == len(answer.plan.slots) - (not aborted), "1.5", "a row of the right gen was dropped")
    counted = driver.scheduler.stats().outputs.stale_outputs
    require(counted == 1, "1.5", f"expected 1 counted stale row, got {counted}")


@pytest.mark.law("8")
def test_pause_keeps_the_order_of_requests(target: SchedulerTarget) -> None:
    driver = drive(target, *long_ones(6, 20), max_num_seqs=3, num_kv_blocks=96, caching=False)
    for _ in range(3):
        driver.step()
    before, running = len(driver.plans), {each.request.name for each in driver.auditor.live}
    driver.pause()
    if len(driver.plans) == before:
        lacks("the scheduler cannot pause")
    driver.run()
    names = [each.request_id for plan in driver.plans[before:] for each in plan.admissions][:3]
    require(set(names) == running, "8", f"{sorted(running)} ran before a pause, and {names} after it")


@pytest.mark.law("1.2", "1.7")
def test_release_without_revocation_is_rejected(target: SchedulerTarget) -> None:
    """A runner that releases a slot which was never revoked breaks the protocol; the scheduler must ignore it."""
    driver = drive(target, *long_ones(2, 8))
    driver.plan()
    answer = driver.in_flight[0]
    tokens = answer.output.tokens.copy()
    tokens[int(answer.plan.slots[0])] = EMPTY_TOKEN_ID
    tokens[int(answer.plan.slots[0]), 0] = PREEMPTED_TOKEN_ID
    with pytest.raises(MalformedOutput):
        driver.scheduler.commit(answer.plan, replace(answer.output, tokens=tokens))
