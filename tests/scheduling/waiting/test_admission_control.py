"""Reserve kept at admission, and its effect on throughput and preemptions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.config import Limits
from fd_core.effects.operations import Effects, Found, Load, Loaded, Lookup, Save, Saved
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.contract import SchedulerSetup
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.policies import Fcfs
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import FewestTokens
from fd_core.scheduling.waiting.admission_control import ReturnCost, UsageForecast, peak_growth
from fd_core.types import RequestSpec, SamplingParams, StepPlan
from tests.scheduling.driving import output_of

BLOCK = 4
END = 51


def test_forecast_learns_used_share_of_max_tokens() -> None:
    forecast = UsageForecast()
    for _ in range(200):
        forecast.observe(10, 100)
    assert abs(forecast.share - 0.1) < 0.01
    remaining = forecast.remaining(np.array([0, 50], np.int32), np.array([100, 100], np.int32))
    assert remaining.tolist() == [10, 25]


def test_first_requests_move_the_forecast_most() -> None:
    forecast = UsageForecast()
    shares = [forecast.share]
    for _ in range(30):
        forecast.observe(0, 100)
        shares.append(forecast.share)
    lost = [1 - after / before for before, after in itertools.pairwise(shares)]
    assert lost[0] == 0.5
    assert lost[:19] == sorted(lost[:19], reverse=True)
    assert lost[-1] == pytest.approx(0.05)


def test_horizon_grows_with_cost_of_resuming() -> None:
    dear, free = ReturnCost(1.0), ReturnCost(0.0)
    assert (dear.horizon(400, 32), dear.horizon(10, 32)) == (200, 32)
    assert free.horizon(400, 32) == 32
    for _ in range(50):
        dear.observe(0, 300)
        free.observe(300, 300)
    assert dear.horizon(400, 32) == 32
    assert free.horizon(400, 32) > 190


def _demand_step_by_step(length: np.ndarray, remaining: np.ndarray, block_size: int) -> int:
    blocks = (-(-length // block_size)).sum()
    demands = [
        int((-(-(length[remaining >= moment] + moment) // block_size)).sum() - blocks)
        for moment in range(1, int(remaining.max(initial=0)) + 1)
    ]
    return max(demands, default=0)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=40), st.integers(1, 16))
def test_peak_equals_step_by_step_simulation(requests: list[tuple[int, int]], block_size: int) -> None:
    length = np.array([tokens for tokens, _ in requests], np.int32)
    remaining = np.array([left for _, left in requests], np.int64)
    peak = max(_demand_step_by_step(length, remaining, block_size), 0)
    predicted = peak_growth(length, -(-length // block_size), remaining, block_size)
    if len(set(remaining.tolist())) <= 8:
        assert predicted == peak
    else:
        assert predicted <= peak


def test_few_sample_points_suffice_for_many_requests() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        length = draw.integers(10, 600, 200).astype(np.int32)
        remaining = draw.integers(1, 400, 200)
        peak = _demand_step_by_step(length, remaining, 32)
        assert abs(peak_growth(length, -(-length // 32), remaining, 32) - peak) < 0.05 * (-(-length // 32)).sum()


class Simulation:
    """Scheduler whose steps complete at once; each request ends after its own number of tokens."""

    def __init__(self, requests: Sequence[tuple[int, int]], max_tokens: int, blocks: int, *, keep: bool) -> None:
        """`requests` are (prompt, output) token counts; `keep` saves KV of preempted requests and loads all of it."""
        longest = max(prompt for prompt, _ in requests) + max_tokens
        limits = Limits(
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_model_len=longest,
            block_size=BLOCK,
            num_kv_blocks=max(blocks, -(-longest // BLOCK)),
            vocab_size=1000,
        )
        hasher = PrefixHasher(block_size=BLOCK, identity="m") if keep else None
        self.scheduler = ContinuousBatchingScheduler(
            SchedulerSetup(
                limits=limits,
                policy=Fcfs(),
                victims=FewestTokens(),
                hasher=hasher,
                keep_kv=OffloadSelection() if keep else None,
            )
        )
        self._outputs = {str(index): output for index, (_, output) in enumerate(requests)}
        self.generated = 0
        self._kept: set[bytes] = set()
        for index, (prompt, _) in enumerate(requests):
            spec = RequestSpec(
                request_id=str(index),
                prompt=tuple(index + 1 if at < 4 else at for at in range(prompt)),
                params=SamplingParams(max_tokens=max_tokens, stop_token_ids=(END,)),
            )
            self._keep(self.scheduler.add(spec))

    def run(self) -> int:
        """Run until all requests have ended; return the number of steps that computed something."""
        scheduler, idle, steps = self.scheduler, 0, 0
        while scheduler.has_work:
            plan, effects = scheduler.plan()
            self._keep(effects)
            idle = idle + 1 if plan is None else 0
            assert idle < 5, "no request makes progress"
            if plan is not None:
                steps += bool(len(plan.slots))
                self._answer(plan)
        scheduler.check_integrity()
        return steps

    def _keep(self, effects: Effects) -> None:
        for effect in effects.operations:
            match effect:
                case Lookup(operation, keys):
                    held = next((index for index, key in enumerate(keys) if key not in self._kept), len(keys))
                    self.scheduler.complete(Found(operation, held, held))
                case Load(operation, keys):
                    self.scheduler.complete(Loaded(operation, len(keys)))
                case Save(operation, keys):
                    self._kept.update(keys)
                    self.scheduler.complete(Saved(operation, len(keys), host=len(keys)))

    def _answer(self, plan: StepPlan) -> None:
        table = self.scheduler.probe().slots
        tokens = {}
        for slot in plan.slots[plan.samples].tolist():
            request = table.requests[slot]
            assert request is not None
            last = request.num_generated + 1 == self._outputs[request.spec.request_id]
            tokens[slot] = [END if last else 50]
        deltas, effects = self.scheduler.commit(plan, output_of(self.scheduler, plan, tokens=tokens))
        self._keep(effects)
        self.generated += sum(len(delta.token_ids) for delta in deltas)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=24),
    st.integers(20, 80),
    st.booleans(),
)
def test_every_resumed_run_fills_a_block(requests: list[tuple[int, int]], blocks: int, keep: bool) -> None:
    simulation = Simulation(requests, 60, blocks, keep=keep)
    simulation.run()
    assert simulation.generated == sum(output for _, output in requests)
    assert (
        simulation.scheduler.probe().running_batch.counters.preemptions <= len(requests) + simulation.generated // BLOCK
    )


def _workload(seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(8, 64), draw.randint(16, 64)) for _ in range(60)]


def _outcome(keep: bool, horizon: int | None) -> tuple[int, int]:
    """Return steps and preemptions over a few workloads; `horizon` overrides the one derived from the cost of
    resuming.
    """
    steps = preemptions = 0
    for seed in range(4):
        simulation = Simulation(_workload(seed), 64, 120, keep=keep)
        if horizon is not None:
            simulation.scheduler.probe().control.return_cost.horizon = lambda *_: horizon  # type: ignore[method-assign]  # override
        steps += simulation.run()
        preemptions += simulation.scheduler.probe().running_batch.counters.preemptions
    return steps, preemptions


def test_preemptions_are_rare_when_resuming_is_expensive() -> None:
    steps, preemptions = _outcome(False, None)
    eager_steps, eager_preemptions = _outcome(False, 1)
    assert preemptions < eager_preemptions / 4
    assert steps < 1.15 * eager_steps


def test_free_resuming_allows_overcommitment() -> None:
    steps, preemptions = _outcome(True, None)
    careful_steps, _ = _outcome(True, 1000)
    assert steps < careful_steps
    assert preemptions < 4 * 60
