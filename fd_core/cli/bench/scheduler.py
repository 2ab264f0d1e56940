"""`fdcore bench scheduler`: cost of planning a step and committing its result, without a model."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fd_core.cli.bench.results import microseconds
from fd_core.cli.bench.workload import synthetic_ids
from fd_core.errors import ConfigError
from fd_core.simulation.engines.scripted import PrefillBurst, SteadyDecode

RUNNING: Final = (16, 256, 1024, 4096)
RUNNING_WITH_QUEUE: Final = (16,)
DRAFTS: Final = (0, 3)
WARM_UP: Final = 20
VOCAB_SIZE: Final = 32000
_PROMPT_TOKENS: Final = 128
_TURN: Final = 10
"""Steps per turn, in which the scheduler with the queue and the one without are measured alternately."""
_BURSTS: Final = 3


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that each step took, in two parts."""

    plan_s: tuple[float, ...] = ()
    commit_s: tuple[float, ...] = ()

    def __add__(self, other: StepTimes) -> StepTimes:
        """Both, one after the other."""
        return StepTimes(self.plan_s + other.plan_s, self.commit_s + other.commit_s)

    @property
    def step_s(self) -> tuple[float, ...]:
        """Both parts of each step."""
        return tuple(plan + commit for plan, commit in zip(self.plan_s, self.commit_s, strict=True))

    def figures(self, running: int, drafts: int) -> dict[str, Any]:
        """Return the case and its figures as plain values; `per_request_us` is the median step over its requests."""
        parts = (("plan", self.plan_s), ("commit", self.commit_s), ("step", self.step_s))
        table = {name: microseconds(seconds) for name, seconds in parts}
        return {
            "running": running,
            "drafts": drafts,
            "steps": len(self.plan_s),
            "us": table,
            "per_request_us": table["step"]["median"] / running,
        }


def prompts(count: int, block_size: int, seed: int) -> list[list[int]]:
    """Return prompts that share no prefix and end at every position of a block, as those of requests that arrived one
    by one do: each step fills a block of one request in `block_size`."""
    longest = synthetic_ids(count, _PROMPT_TOKENS + block_size - 1, VOCAB_SIZE, seed=seed)
    return [ids[: _PROMPT_TOKENS + index % block_size] for index, ids in enumerate(longest)]


def steady_decode(
    asked: Sequence[Sequence[int]], steps: int, drafts: int, block_size: int, seed: int, waiting_tokens: int = 0
) -> SteadyDecode:
    """Return requests in steady decode, warmed up, for `steps` more steps; `ConfigError` if a waiting prompt fits."""
    try:
        workload = SteadyDecode(
            asked,
            steps=WARM_UP + steps,
            num_drafts=drafts,
            waiting_tokens=waiting_tokens,
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
            draw=np.random.default_rng(seed),
        )
    except ValueError as error:
        raise ConfigError(str(error), field="--waiting-tokens", hint="or lower --steps or --running") from error
    measure(workload, WARM_UP)
    return workload


def measure(workload: SteadyDecode, steps: int) -> StepTimes:
    """Time `steps` steps. Raises `RuntimeError` if one of them skipped a request or a draft."""
    full = workload.num_running * (1 + workload.limits.max_drafts)
    planning, committing = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = workload.plan()
        planned = time.perf_counter()
        output = workload.answer(plan)
        answered = time.perf_counter()
        workload.commit(plan, output)
        committed = time.perf_counter()
        if plan.total_tokens != full:
            raise RuntimeError(f"step {plan.step}: expected {full} tokens, got {plan.total_tokens}")
        planning.append(planned - begin)
        committing.append(committed - answered)
    return StepTimes(tuple(planning), tuple(committing))


def step_figures(running: int, drafts: int, *, steps: int, block_size: int, seed: int) -> dict[str, Any]:
    """Time steps of steady decode."""
    workload = steady_decode(prompts(running, block_size, seed), steps, drafts, block_size=block_size, seed=seed)
    return measure(workload, steps).figures(running, drafts)


def queue_figures(
    running: int, drafts: int, waiting: int, waiting_tokens: int, *, steps: int, block_size: int, seed: int
) -> dict[str, Any]:
    """Compare planning with `waiting` prompts that do not fit against planning with an empty queue.

    The two alternate, because the speed of machines drifts. `ratio` is that of the median plans. Raises `ConfigError`
    for prompts that would fit.
    """
    asked = prompts(running, block_size, seed)
    empty, beside = (steady_decode(asked, steps, drafts, block_size, seed, waiting_tokens) for _ in range(2))
    # Different from the first block on; the rest is identical, which saves memory.
    heads = synthetic_ids(waiting, min(block_size, waiting_tokens), VOCAB_SIZE, seed=seed + 1)
    [tail] = synthetic_ids(1, waiting_tokens - len(heads[0]), VOCAB_SIZE, seed=seed + 2)
    for head in heads:
        beside.queue(head + tail)
    times = {"empty": StepTimes(), "waiting": StepTimes()}
    gc.collect()
    left = steps
    while left:
        turn = min(_TURN, left)
        left -= turn
        for name, workload in (("empty", empty), ("waiting", beside)):
            times[name] += measure(workload, turn)
    if beside.num_waiting != waiting:
        raise RuntimeError(f"expected {waiting} waiting prompts at the end, got {beside.num_waiting}")
    plans = {name: microseconds(measured.plan_s) for name, measured in times.items()}
    return {
        "running": running,
        "drafts": drafts,
        "steps": steps,
        "waiting": waiting,
        "waiting_tokens": waiting_tokens,
        "plan_us": plans,
        "ratio": plans["waiting"]["median"] / plans["empty"]["median"],
    }


def burst_figures(count: int, tokens: int, *, block_size: int, seed: int) -> dict[str, Any]:
    """Time plans from the arrival of `count` prompts of `tokens` tokens that share a prefix until all were admitted.

    `worst_plan_us` is the longest plan of a burst, the median of several bursts; `add_us` the cost of adding a request.
    Times are CPU times of this thread, so that other work on the machine does not make a plan the worst.
    """
    adding: list[float] = []
    planning: list[float] = []
    worst = []
    for number in range(_BURSTS):
        burst = PrefillBurst(
            count, tokens, block_size=block_size, vocab_size=VOCAB_SIZE, draw=np.random.default_rng(seed + number)
        )
        gc.collect()
        for prompt in burst.prompts:
            begin = time.thread_time()
            burst.queue(prompt)
            adding.append(time.thread_time() - begin)
        plans = []
        while burst.num_waiting:
            begin = time.thread_time()
            plan = burst.plan()
            plans.append(time.thread_time() - begin)
            burst.commit(plan, burst.answer(plan))
        worst.append(max(plans))
        planning += plans
    return {
        "prompts": count,
        "prompt_tokens": tokens,
        "plans": len(planning) // _BURSTS,
        "add_us": microseconds(adding),
        "plan_us": microseconds(planning),
        "worst_plan_us": float(np.median(worst)) * 1e6,
    }
