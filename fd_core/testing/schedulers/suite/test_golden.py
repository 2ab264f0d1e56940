"""Golden: whatever the order of calls, everybody gets the right text, protocol 1 to 4."""

from __future__ import annotations

import pytest

from fd_core.testing.schedulers.driver import drive
from fd_core.testing.schedulers.machine import run_hostile_orders
from fd_core.testing.schedulers.scripts import many_specs
from fd_core.testing.schedulers.target import SchedulerTarget


@pytest.mark.law("4", "1.1")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("k", "budget"), [(0, 24), (0, 1), (1, 9), (3, 24), (5, 6)])
def test_batches_chunks_preemption_and_drafts_change_no_text(
    target: SchedulerTarget, k: int, budget: int, depth: int
) -> None:
    driver = drive(target, *many_specs(), k=k, wrong=0.3, depth=depth, max_num_batched_tokens=budget)
    driver.run(depth)
    driver.check_texts()


@pytest.mark.law("1.1", "1.2", "1.3", "1.4", "1.5", "1.7", "2.1", "2.2", "3.1", "3.2", "3.5", "3.6", "4")
def test_hostile_orders(target: SchedulerTarget, examples: int) -> None:
    run_hostile_orders(target, examples)
