"""Times of a runner's steps: back-to-back decodes, and prefills."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np

from fd_core.config import Limits
from fd_core.runner.runner import Runner
from fd_core.types import Admission, BlockGrant, SamplingParams, StepPlan

__all__ = ["StepTimes", "limits_for", "time_decodes", "time_prefills"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of steps of one kind."""

    seconds: float
    """From one answer to the next, two steps in flight for decodes: the median."""
    launch: float
    """Of the host, to queue a step: the median."""
    steps: int


def limits_for(rows: int, context: int, prefill: int, vocab_size: int, steps: int, block_size: int = 32) -> Limits:
    """Return limits that hold `rows` decodes of `context` tokens that grow by `steps`, or a prefill alone."""
    longest = max(context + steps + 1, prefill + 1)
    blocks = rows * -(-(context + steps + 1) // block_size)
    return Limits(
        max_num_seqs=rows,
        max_num_batched_tokens=max(prefill, rows),
        max_model_len=longest,
        block_size=block_size,
        num_kv_blocks=max(blocks, -(-longest // block_size)),
        vocab_size=vocab_size,
    )


def time_decodes(runner: Runner, rows: int, context: int, steps: int, gen: int = 1) -> StepTimes:
    """Decode `rows` requests whose tokens before `context` count as computed; their values do not affect the time.

    Two steps are in flight, as in an engine on a device.
    """
    limits = runner.limits
    each = -(-(context + steps + 1) // limits.block_size)
    rng = np.random.default_rng(gen)
    params = SamplingParams(temperature=0.0)
    admissions, grants = [], []
    for slot in range(rows):
        tokens = rng.integers(0, limits.vocab_size, context).astype(np.int32)
        admissions.append(Admission(slot, gen, tokens, context, params, (), context - 1))
        grants.append(BlockGrant(slot, 0, np.arange(slot * each, (slot + 1) * each, dtype=np.int32)))
    slots = np.arange(rows, dtype=np.int32)

    def plan(step: int) -> StepPlan:
        start = np.full(rows, context - 1 + step, np.int32)
        first = {"admissions": tuple(admissions), "grants": tuple(grants)} if step == 0 else {}
        ones = np.ones(rows, np.int32)
        return StepPlan(1, step, slots, ones * gen, start, ones, ones * 0, np.ones(rows, np.bool_), **first)

    flying: deque = deque()
    answers, launches = [], []
    for step in range(steps):
        begun = time.perf_counter()
        flying.append(runner.launch(plan(step)))
        launches.append(time.perf_counter() - begun)
        if len(flying) > 1:
            runner.finish(flying.popleft())
            answers.append(time.perf_counter())
    runner.finish(flying.popleft())
    warm = steps // 4  # the first steps admit and compile
    return StepTimes(float(median(np.diff(answers[warm:]))), float(median(launches[warm:])), steps)


def time_prefills(runner: Runner, tokens: int, repeats: int, gen: int = 1) -> StepTimes:
    """Prefill a prompt of `tokens` in slot 0, again and again, each alone."""
    limits = runner.limits
    rng = np.random.default_rng(gen)
    blocks = np.arange(-(-(tokens + 1) // limits.block_size), dtype=np.int32)
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    seconds, launches = [], []
    for repeat in range(repeats + 1):
        prompt = rng.integers(0, limits.vocab_size, tokens).astype(np.int32)
        mine = one * (gen + repeat)
        admission = Admission(0, int(mine[0]), prompt, tokens, SamplingParams(temperature=0.0), (), 0)
        samples = np.ones(1, np.bool_)
        plan = StepPlan(
            1, repeat, zero, mine, zero, one * tokens, zero, samples, (admission,), (BlockGrant(0, 0, blocks),)
        )
        begun = time.perf_counter()
        launched = runner.launch(plan)
        launches.append(time.perf_counter() - begun)
        runner.finish(launched)
        seconds.append(time.perf_counter() - begun)
    return StepTimes(float(median(seconds[1:])), float(median(launches[1:])), repeats)
