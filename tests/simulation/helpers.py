"""Small worlds for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fd_core.config import EngineConfig, Limits
from fd_core.plugins import installed_plugins
from fd_core.simulation.clock.waits import WAITS
from fd_core.simulation.costs.profile import Costs
from fd_core.simulation.engines.engine import SimulatedPool
from fd_core.simulation.results.summary import Run
from fd_core.simulation.workloads.conversations import Conversation, Piece, UserTurn
from fd_core.simulation.world import SimulatedDeployment, World
from fd_core.types import StepPlan
from tests.simulation.kv_checked import kv_checked

SYSTEM = Piece(7, 40)
"""Prefix of every conversation."""


class PlainCosts(Costs):
    """Round costs that are easy to add up by hand."""

    def __init__(self) -> None:
        """Accept no profile."""

    def step(self, plan: StepPlan) -> float:
        return 0.01 + 1e-4 * plan.total_tokens

    def shared_read(self, positions: int) -> float:
        return 0.0

    def images(self, tokens: int) -> float:
        return 1e-3 * tokens

    def turn(self, plan: StepPlan) -> float:
        return 0.0

    def request(self, tokens: int) -> float:
        return 0.001

    def delivery(self) -> float:
        return 0.0

    def host_copy(self, blocks: int) -> float:
        return 1e-4 * blocks

    def store_read(self, blocks: int) -> float:
        return 1e-3 + 1e-4 * blocks

    def store_write(self, blocks: int) -> float:
        return 1e-3 + 1e-4 * blocks

    def transfer(self, blocks: int) -> float:
        return 1e-4 * blocks


def limits(**changes: Any) -> Limits:
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 1024,
        "block_size": 16,
        "num_kv_blocks": 200,
        "vocab_size": 1000,
        "pipeline_depth": 2,
    }
    return Limits(**{**settings, **changes})


def group(
    *, config: dict[str, Any] | None = None, limit: dict[str, Any] | None = None, **changes: Any
) -> SimulatedPool:
    settings = {"model": "made-up", "watchdog_seconds": 5.0} | (config or {})
    made = {"config": EngineConfig(**settings), "limits": limits(**(limit or {})), "costs": PlainCosts()}
    return SimulatedPool(**{**made, "profile": "plain", **changes})


def world(*groups: SimulatedPool, seed: int = 0, audit: bool = True, **changes: Any) -> World:
    groups = groups or (group(),)
    if audit:
        groups = tuple(replace(each, computer=partial(kv_checked, each.acceptance)) for each in groups)
    deployment = SimulatedDeployment(label="test", groups=groups, audit=audit, **changes)
    return World(deployment, installed_plugins(), seed)


def conversations(
    count: int,
    rate: float = 20.0,
    *,
    seed: int = 0,
    turns: int = 1,
    adjust: Callable[[UserTurn, random.Random], UserTurn] = lambda turn, _: turn,
) -> Iterator[Conversation]:
    """Yield conversations with random arrivals; `adjust` changes a turn."""
    draw, at = random.Random(f"{seed}/conversations"), 0.0
    for number in range(count):
        at += draw.expovariate(rate)
        made = []
        for turn in range(turns):
            seed_of = 1000 * number + 2 * turn + 10**6 * (seed + 1)
            adds = (Piece(seed_of, draw.randint(1, 120)),)
            answer = Piece(seed_of + 1, draw.randint(0, 60))
            plain = UserTurn(adds if turn else (SYSTEM, *adds), answer, think=draw.random() if turn else 0.0)
            made.append(adjust(plain, draw))
        yield Conversation(f"c{number}", at, tuple(made))


def require_complete_waits(run: Run) -> None:
    """Raise `AssertionError` unless wait reasons cover the time of every request, before and after its first token."""
    waits = np.frombuffer(run.waits, np.float32).reshape(-1, 2, len(WAITS))
    sums = waits.sum(2, dtype=np.float64)
    assert len(waits) == len(run.outcomes) and waits.min(initial=0.0) >= 0
    for outcome, (before, between) in zip(run.outcomes, sums.tolist(), strict=True):
        first = outcome.ended if outcome.first_token is None else outcome.first_token
        close = 1e-5 * (outcome.ended - outcome.arrived) + 1e-6
        assert abs(before - (first - outcome.arrived)) <= close, outcome
        assert abs(between - (outcome.ended - first)) <= close, outcome
