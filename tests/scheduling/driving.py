"""Helpers that drive a scheduler step by step with scripted runner outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fd_core.config import Limits
from fd_core.effects.operations import Effect, Effects
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.contract import SchedulerSetup
from fd_core.scheduling.policies import Fcfs
from fd_core.scheduling.requests import Request
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import LatestArrival
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID
from fd_core.types import Delta, RequestSpec, SamplingParams, StepOutput, StepPlan

__all__ = [
    "HASHER",
    "add",
    "answer",
    "commit",
    "next_plan",
    "num_draining",
    "num_loading",
    "num_running",
    "output_of",
    "planned",
    "scheduler",
    "spec",
    "take_effects",
]

HASHER = PrefixHasher(block_size=4, identity="m")
_SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 40,
    "block_size": 4,
    "num_kv_blocks": 20,
    "vocab_size": 100,
}

_wanted: WeakKeyDictionary[ContinuousBatchingScheduler, list[Effect]] = WeakKeyDictionary()
"""Effects of each scheduler that no test has taken yet."""


def scheduler(
    kind: type[ContinuousBatchingScheduler] = ContinuousBatchingScheduler, **given: Any
) -> ContinuousBatchingScheduler:
    """Return a scheduler that reserves no blocks, so that shortages occur early; `given` are limits and its setup."""
    limits = _SIZES | {name: given.pop(name) for name in [*given] if name in Limits.__struct_fields__}
    setup = {"policy": Fcfs(), "victims": LatestArrival(), "hasher": None, **given}
    made = kind(SchedulerSetup(limits=Limits(**limits), **setup))
    made.probe().control.forecast.share = 0.0
    return made


def spec(name: str, length: int = 6, max_tokens: int = 8, first: int = 0, **fields: Any) -> RequestSpec:
    """Return a request whose prompt counts from `first`."""
    prompt = tuple(range(first, first + length))
    return RequestSpec(request_id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens), **fields)


def add(scheduler: ContinuousBatchingScheduler, spec: RequestSpec) -> Request:
    """Queue a request and return the scheduler's record of it."""
    _remember(scheduler, scheduler.add(spec))
    return scheduler.probe().requests[spec.request_id]


def next_plan(scheduler: ContinuousBatchingScheduler) -> StepPlan | None:
    """Return the next plan, or None if a step would do nothing."""
    plan, effects = scheduler.plan()
    _remember(scheduler, effects)
    assert plan is None or plan.total_tokens <= scheduler.limits.max_num_batched_tokens
    return plan


def planned(scheduler: ContinuousBatchingScheduler) -> StepPlan:
    """Return the next plan, which must exist."""
    plan = next_plan(scheduler)
    assert plan is not None
    return plan


def output_of(
    scheduler: ContinuousBatchingScheduler,
    plan: StepPlan,
    token: int = 50,
    *,
    drafts_ready: int | None = None,
    tokens: Mapping[int, list[int]] | None = None,
    errors: tuple[tuple[int, str], ...] = (),
) -> StepOutput:
    """Return the output of a healthy runner: rows that sample deliver `token`, or the entry of `tokens` for their
    slot.
    """
    limits = scheduler.limits
    matrix = np.full((limits.max_num_seqs, 1 + limits.max_drafts), EMPTY_TOKEN_ID, np.int32)
    gens = scheduler.probe().slots.gen.copy()
    for row, slot in enumerate(plan.slots.tolist()):
        gens[slot] = plan.gens[row]
        if plan.samples[row]:
            delivered = [token] if tokens is None or slot not in tokens else tokens[slot]
            matrix[slot, : len(delivered)] = delivered
    for revoked in plan.revocations:
        gens[revoked.slot] = revoked.gen
        matrix[revoked.slot] = EMPTY_TOKEN_ID
        matrix[revoked.slot, 0] = PREEMPTED_TOKEN_ID
    ready = None if drafts_ready is None else np.full(limits.max_num_seqs, drafts_ready, np.int32)
    return StepOutput(plan.epoch, plan.step, matrix, gens, ready, errors=errors)


def commit(scheduler: ContinuousBatchingScheduler, plan: StepPlan, output: StepOutput) -> list[Delta]:
    """Commit an output and return the deltas for clients."""
    deltas, effects = scheduler.commit(plan, output)
    _remember(scheduler, effects)
    return deltas


def answer(scheduler: ContinuousBatchingScheduler, plan: StepPlan, token: int = 50) -> list[Delta]:
    """Commit the output of a healthy runner and return the deltas for clients."""
    return commit(scheduler, plan, output_of(scheduler, plan, token))


def take_effects(scheduler: ContinuousBatchingScheduler) -> list[Effect]:
    """Return the scheduler's effects since the last call, including those that its next call would return."""
    effects = _wanted.pop(scheduler, [])
    effects.extend(scheduler.probe().operations.take()[0])
    return effects


def num_running(scheduler: ContinuousBatchingScheduler) -> int:
    """Return the number of running requests."""
    return int(scheduler.probe().slots.running.sum())


def num_loading(scheduler: ContinuousBatchingScheduler) -> int:
    """Return the number of requests in slots whose KV is still loading."""
    return int(scheduler.probe().slots.loading.sum())


def num_draining(scheduler: ContinuousBatchingScheduler) -> int:
    """Return the number of preempted slots that are not yet freed."""
    return int(scheduler.probe().slots.draining.sum())


def _remember(scheduler: ContinuousBatchingScheduler, effects: Effects) -> None:
    _wanted.setdefault(scheduler, []).extend(effects.operations)
