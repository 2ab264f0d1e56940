"""Pairs: prompts that another worker computes, or that are computed for another, protocol 6."""

from __future__ import annotations

import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.device import job_of
from fd_core.testing.schedulers.driver import SchedulerTarget, drive, prompt_of
from fd_core.testing.schedulers.tiers import PEER
from fd_core.types import StepPlan


@pytest.mark.law("6.1")
def test_lease_leaves_room_for_running_requests(target: SchedulerTarget) -> None:
    """A running request will need nearly the whole pool; no prompt may be fetched into those blocks before it ends."""
    driver = drive(target, greedy("runs", prompt_of(12), 40), paired=True)
    driver.run_until(lambda: driver.texts.tokens)
    driver.submit(greedy("far", prompt_of(38, 1), 24, prefill_at=PEER))
    for _ in range(120):
        if "runs" in driver.texts.ends:
            break
        driver.step_alone()
    room = not driver.auditor.preemptions and "runs" in driver.texts.ends
    require(room, "6.1", "blocks were leased that a running request needed to go on")
    driver.run()
    fetched = driver.auditor.requests["far"].fetches
    require(fetched, "6.1", "a prompt was computed here, though the blocks were free and another worker computes it")


@pytest.mark.law("6.2", "4")
@pytest.mark.parametrize(("others", "budget"), [(2, 3), (3, 4)])
def test_preempted_job_resumes_after_the_blocks_already_sent(target: SchedulerTarget, others: int, budget: int) -> None:
    """Growing requests take the blocks of a partially sent prompt."""
    texts = [greedy(f"r{index}", prompt_of(3, index), 30) for index in range(others)]
    driver = drive(target, *texts, paired=True, depth=2, max_num_seqs=others + 1, max_num_batched_tokens=budget)
    driver.run_until(lambda: len(driver.texts.tokens.get("r0", ())) >= 4, 2)
    driver.submit(job_of(greedy("job", prompt_of(20, 7), 1)))
    job = driver.auditor.requests["job"]
    sent: list[int] = []

    def watch(plan: StepPlan) -> None:
        sent.extend(job.sent for each in plan.revocations if driver.auditor.occupancies[each.slot].request is job)

    driver.run(2, watch=watch)
    require(job.is_over, "6.2", "the job ended without a message on its lease")
    if not any(sent):
        lacks("the scheduler preempts no partially sent job here")
