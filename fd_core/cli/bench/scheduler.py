"""`fdcore bench scheduler`: what planning a step and taking in its answer cost, without a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fd_core.cli.bench.workload import synthetic_ids
from fd_core.simulation.steady_decode import SteadyDecode

__all__ = ["DRAFTS", "RUNNING", "VOCAB_SIZE", "WARM_UP", "StepTimes", "measure", "prompts", "steady_decode"]

RUNNING: Final = (16, 256, 1024, 4096)
DRAFTS: Final = (0, 3)
WARM_UP: Final = 20
"""Steps that are not counted."""
VOCAB_SIZE: Final = 32000
_PROMPT_TOKENS: Final = 128


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

    def microseconds(self) -> dict[str, dict[str, float]]:
        """Return median, p99 and mean of `plan`, `commit` and both, in microseconds."""
        return {
            name: {
                "median": float(np.median(seconds)) * 1e6,
                "p99": float(np.percentile(seconds, 99)) * 1e6,
                "mean": float(np.mean(seconds)) * 1e6,
            }
            for name, seconds in (("plan", self.plan_s), ("commit", self.commit_s), ("step", self.step_s))
        }

    def figures(self, running: int, drafts: int) -> dict[str, Any]:
        """Return the case and its figures as plain values; `per_request_us` is the median step over its requests."""
        table = self.microseconds()
        return {
            "running": running,
            "drafts": drafts,
            "steps": len(self.plan_s),
            "us": table,
            "per_request_us": table["step"]["median"] / running,
        }


def prompts(count: int, block_size: int, seed: int) -> list[list[int]]:
    """Return prompts that share no prefix and end at every place of a block, as those of requests that came one by
    one do: each step fills a block of one request in `block_size`."""
    longest = synthetic_ids(count, _PROMPT_TOKENS + block_size - 1, VOCAB_SIZE, seed)
    return [ids[: _PROMPT_TOKENS + index % block_size] for index, ids in enumerate(longest)]


def steady_decode(asked: Sequence[Sequence[int]], steps: int, drafts: int, block_size: int, seed: int) -> SteadyDecode:
    """Return requests in steady decode, warmed up and good for `steps` more steps."""
    workload = SteadyDecode(
        asked,
        steps=WARM_UP + steps,
        num_drafts=drafts,
        block_size=block_size,
        vocab_size=VOCAB_SIZE,
        draw=np.random.default_rng(seed),
    )
    measure(workload, WARM_UP)
    return workload


def measure(workload: SteadyDecode, steps: int) -> StepTimes:
    """Time `steps` steps. Raises `RuntimeError` if one of them left a request or a draft out."""
    full = workload.limits.max_num_seqs * (1 + workload.limits.max_drafts)
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
            raise RuntimeError(f"step {plan.step} computes {plan.total_tokens} tokens instead of {full}")
        planning.append(planned - begin)
        committing.append(committed - answered)
    return StepTimes(tuple(planning), tuple(committing))
