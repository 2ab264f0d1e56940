"""Pairs: prompts that another worker computes, or that are computed for another, protocol 6."""

from __future__ import annotations

import pytest

from fd_core.effects.operations import Fetch, Send
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.driver import Driver, SchedulerTarget, drive, prompt_of
from fd_core.testing.schedulers.suite.test_signals import long_ones
from fd_core.testing.schedulers.tiers import OperationEnd, elsewhere, job_for
from fd_core.types import StepPlan


def until_fetched(driver: Driver) -> Fetch:
    """Step until a prompt is fetched from another worker, without completing the fetch."""
    driver.run_until(lambda: driver.begun(Fetch))
    if not driver.begun(Fetch):
        broken("6.1", "another worker should compute a prompt, but no blocks are leased to it")
    return driver.begun(Fetch)[0]


def end(driver: Driver, how: OperationEnd) -> None:
    """Complete the oldest fetch."""
    driver.complete(next(index for index, each in enumerate(driver.tiers.pending) if isinstance(each, Fetch)), how)


@pytest.mark.law("6.2", "4")
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("length", [6, 9, 38])
def test_text_starts_after_the_transferred_kv(target: SchedulerTarget, length: int, k: int) -> None:
    """Other requests run meanwhile; the one that waits for its KV computes nothing."""
    prompt, other = prompt_of(length, 1), greedy("other", prompt_of(3, 2), 12)
    specs = [*elsewhere(greedy("far", prompt, 12)), other]
    driver = drive(target, *specs, k=k, wrong=0.3, paired=True, num_kv_blocks=32)
    until_fetched(driver)
    driver.run_until(lambda: "other" in driver.texts.ends)
    require("far" not in driver.texts.tokens, "6.2", "it got tokens before its KV arrived")
    require("other" in driver.texts.ends, "6.2", "a request without a remote prefill waits for another worker")
    end(driver, OperationEnd.WELL)
    driver.run()
    computed = driver.computed_before("far")
    require(computed == [length - 1], "6.2", f"the KV of {length - 1} tokens arrived, but it began with {computed}")


@pytest.mark.law("6.1")
def test_lease_leaves_room_for_running_requests(target: SchedulerTarget) -> None:
    """A running request will need nearly the whole pool; no prompt may be fetched into those blocks."""
    driver = drive(target, greedy("runs", prompt_of(12), 40), paired=True)
    driver.run_until(lambda: driver.texts.tokens)
    driver.submit(*elsewhere(greedy("far", prompt_of(38, 1), 24)))
    for _ in range(120):
        if "runs" in driver.texts.ends:
            break
        driver.step_alone()
    room = not driver.auditor.preemptions and "runs" in driver.texts.ends
    require(room, "6.1", "blocks were leased that a running request needed to go on")
    driver.run()


@pytest.mark.law("6.2", "3.2", "3.5")
@pytest.mark.parametrize("held", [0, 2])
@pytest.mark.parametrize(("length", "budget"), [(3, 24), (8, 24), (37, 24), (37, 4), (37, 7)])
def test_every_block_of_a_job_is_sent_once_when_it_is_settled(
    target: SchedulerTarget, length: int, budget: int, held: int
) -> None:
    """Unread blocks must not be overwritten, although other requests need blocks."""
    held = min(held, length // 4)
    job = job_for("job", prompt_of(length), held)
    driver = drive(target, job, depth=2, paired=True, max_num_batched_tokens=budget)
    driver.submit(*(greedy(f"r{index}", prompt_of(9, index), 20) for index in range(3)))
    for _ in range(40):
        driver.step_alone(2)
    driver.run(2)
    over = driver.auditor.requests["job"].is_over
    require(over, "6.2", f"the prompt is computed, but only partially sent: {driver.begun(Send)}")


@pytest.mark.law("6.2", "4")
@pytest.mark.parametrize(("others", "budget"), [(2, 3), (3, 4)])
def test_preempted_job_resumes_after_the_blocks_already_sent(target: SchedulerTarget, others: int, budget: int) -> None:
    """Growing requests take the blocks of a partially sent prompt."""
    texts = [greedy(f"r{index}", prompt_of(3, index), 30) for index in range(others)]
    driver = drive(target, *texts, paired=True, depth=2, max_num_seqs=others + 1, max_num_batched_tokens=budget)
    driver.run_until(lambda: len(driver.texts.tokens.get("r0", ())) >= 4, 2)
    driver.submit(job_for("job", prompt_of(20, 7)))
    job = driver.auditor.requests["job"]
    sent: list[int] = []

    def watch(plan: StepPlan) -> None:
        sent.extend(job.sent for each in plan.revocations if driver.auditor.occupancies[each.slot].request is job)

    driver.run(2, watch=watch)
    require(job.is_over, "6.2", "the job ended without a message on its lease")
    if not any(sent):
        lacks("the scheduler preempts no partially sent job here")


@pytest.mark.law("6.1", "1.7")
@pytest.mark.parametrize("where", ["waits", "runs"])
def test_a_job_that_is_aborted_is_given_up_once(target: SchedulerTarget, where: str) -> None:
    before = long_ones(2, 12) if where == "waits" else []
    driver = drive(target, *before, paired=True, max_num_seqs=2, max_num_batched_tokens=7)
    driver.run_until(lambda: len(driver.auditor.live) == len(before))
    driver.submit(job_for("job", prompt_of(37, 9)))
    job = driver.auditor.requests["job"]
    reached = driver.run_until(lambda: job.where == where and (where == "waits" or job.sent))
    require(reached, "6.2", "a job runs for long without sending blocks")
    driver.abort("job", "job")
    driver.run()
    require(job.is_over, "6.1", "the job was aborted, but its lease is still active")
