"""Golden: whatever the order of calls, everybody gets the right text, protocol 1 to 4."""

from __future__ import annotations

import msgspec
import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.schedulers.driver import SchedulerTarget, drive, prompt_of
from fd_core.testing.schedulers.machine import run_hostile_orders
from fd_core.testing.schedulers.scripts import many_specs, whole_text
from fd_core.testing.stepping.texts import greedy
from fd_core.types import FinishReason, Pooling


@pytest.mark.law("4", "1.1")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("k", "budget"), [(0, 24), (0, 1), (1, 9), (3, 24), (5, 6)])
def test_batches_chunks_preemption_and_drafts_change_no_text(
    target: SchedulerTarget, k: int, budget: int, depth: int
) -> None:
    driver = drive(target, *many_specs(), k=k, wrong=0.3, depth=depth, max_num_batched_tokens=budget)
    driver.run(depth)


@pytest.mark.law("1.1", "4")
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("k", [0, 3, 5])
def test_a_text_ends_where_it_has_to_whatever_was_drafted_behind_it(
    target: SchedulerTarget, k: int, logprobs: int | None
) -> None:
    """At the limit, at a stop token, and at a stop token that is also the last token of the limit."""
    specs, stopped = [], []
    for index, length in enumerate((1, 2, 3, 4, 5, 6, 7)):
        plain = greedy(f"limit{index}", prompt_of(5, index), length, logprobs=logprobs)
        text = whole_text(plain)
        specs.append(plain)
        if text[-1] not in text[:-1]:
            for more in (0, 3):
                name, stop = f"stop{index}+{more}", (text[-1],)
                specs.append(greedy(name, plain.prompt, length + more, logprobs=logprobs, stop_token_ids=stop))
                stopped.append(name)
    driver = drive(target, *specs, k=k, known=[greedy("on", each.prompt, 20) for each in specs[::3]], depth=2)
    driver.run(2)
    for name, end in driver.texts.ends.items():
        right = FinishReason.STOP if name in stopped else FinishReason.LENGTH
        require(end is right, "1.1", f"{name} ended with {end} instead of {right}")


@pytest.mark.law("4")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [5, 24])
def test_what_is_asked_of_a_prompt_is_computed_though_its_kv_is_known(
    target: SchedulerTarget, budget: int, depth: int
) -> None:
    """Log-probabilities and means of prompts that others had before, in chunks, in turns and with preemption."""
    prompts = [[*prompt_of(20), *prompt_of(length, 1)] for length in (0, 1, 6, 12)]
    known = [greedy(f"known{index}", prompt, 30) for index, prompt in enumerate(prompts)]
    driver = drive(target, *known[:2], depth=depth, max_num_batched_tokens=budget)
    driver.run(depth)
    for index, prompt in enumerate(prompts):
        scored = greedy(f"scored{index}", prompt, 30, prompt_logprobs=index)
        mean = greedy(f"mean{index}", prompt, 1)
        driver.submit(known[index], scored) if index > 1 else driver.submit(scored)
        driver.submit(msgspec.structs.replace(mean, pooling=Pooling("mean")))
        driver.step(depth)
    driver.run(depth)


@pytest.mark.law("1.1", "1.2", "1.3", "1.4", "1.5", "1.7", "2.1", "2.2", "3.1", "3.2", "3.5", "3.6", "4")
def test_hostile_orders(target: SchedulerTarget, examples: int) -> None:
    run_hostile_orders(target, examples)
