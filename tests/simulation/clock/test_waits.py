"""Every second of every request has a wait reason, under any faults."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.router.config import RouterConfig
from fd_core.simulation.clock.waits import FRONT, RESTART, STEP, WAITS, WaitAccount
from fd_core.simulation.results.summary import Run
from fd_core.simulation.storage.storage import SharedStore
from fd_core.simulation.workloads.conversations import Conversation, Piece, UserTurn
from tests.simulation.helpers import conversations, group, require_complete_waits, world
from tests.simulation.storage.test_outside import pair, stored


def mean(run: Run, reason: str, part: int | None = None) -> float:
    """Return the mean seconds that requests waited for a reason: before the first token, after it, or both."""
    waits = np.frombuffer(run.waits, np.float32).reshape(-1, 2, len(WAITS))[:, :, WAITS.index(reason)]
    return float((waits.sum(1) if part is None else waits[:, part]).mean())


def long(turn: UserTurn, draw: random.Random) -> UserTurn:
    return msgspec.structs.replace(turn, answer=Piece(turn.answer.seed, draw.randint(50, 300)))


def test_single_request_waits_only_for_fixed_overheads() -> None:
    run = world(group(limit={"pipeline_depth": 1}), routers=0, latency=0.001).run(
        [Conversation("c", 1.0, (UserTurn((Piece(1, 100),), Piece(2, 3)),))]
    )
    require_complete_waits(run)
    waits = np.frombuffer(run.waits, np.float32).reshape(2, -1)
    assert {WAITS[index]: pytest.approx(waits[0, index]) for index in np.flatnonzero(waits[0] > 1e-6)} == {
        "network": 0.002,
        "front": 0.001,
        "computing": 0.02,
    }
    assert {WAITS[index] for index in np.flatnonzero(waits[1] > 1e-6)} == {"computing"}


def test_slot_shortage_is_the_wait_reason() -> None:
    run = world(group(limit={"max_num_seqs": 1}), routers=0).run(conversations(20, rate=200.0))
    require_complete_waits(run)
    assert mean(run, "slot", 0) > 10 * (mean(run, "blocks") + mean(run, "budget") + mean(run, "step"))
    assert mean(run, "slot", 1) == 0


def test_block_shortage_is_the_wait_reason() -> None:
    tight = group(config={"save_preempted_kv": False}, limit={"num_kv_blocks": 40, "max_num_seqs": 64})
    run = world(tight, routers=0).run(conversations(30, rate=200.0, adjust=long))
    require_complete_waits(run)
    assert run.counters["preemptions"] > 0
    assert mean(run, "blocks", 0) > 10 * mean(run, "slot")
    assert mean(run, "preempted", 1) > 0


def test_small_budget_and_current_step_are_wait_reasons() -> None:
    run = world(group(limit={"max_num_batched_tokens": 16}), routers=0).run(conversations(20, rate=200.0))
    require_complete_waits(run)
    assert mean(run, "budget", 0) > mean(run, "slot") and mean(run, "step", 0) > 0


def test_engine_restart_is_a_wait_reason() -> None:
    one = world(group(restart_seconds=0.5), routers=0)
    for at in (0.4, 1.2):
        one.timeline.at(at, lambda: one.workers[0].client.die("a fault"))
    run = one.run(conversations(20, rate=100.0))
    require_complete_waits(run)
    assert 0 < mean(run, "restart") < 1.0 and mean(run, "computing", 1) > 0


def test_failed_attempts_are_a_wait_reason() -> None:
    one = world(group(count=3), router=RouterConfig(policy="round_robin"))
    one.timeline.at(0.5, one.workers[0].kill)
    one.timeline.at(3.0, one.workers[0].start)
    run = one.run(conversations(60))
    require_complete_waits(run)
    again = {index for index, outcome in enumerate(run.outcomes) if outcome.attempts > 1}
    waits = np.frombuffer(run.waits, np.float32).reshape(-1, 2, len(WAITS))
    assert set(np.flatnonzero(waits[:, 0, WAITS.index("retry")]).tolist()) == again != set()


def test_disconnected_clients_have_wait_reasons() -> None:
    def hasty(turn: UserTurn, draw: random.Random) -> UserTurn:
        return msgspec.structs.replace(turn, patience=draw.uniform(0.0001, 0.5))

    run = world(group(count=2, limit={"max_num_seqs": 1})).run(conversations(60, rate=60.0, adjust=hasty))
    require_complete_waits(run)
    left = [outcome.end == "left" for outcome in run.outcomes]
    waits = np.frombuffer(run.waits, np.float32).reshape(-1, 2, len(WAITS))
    assert waits[left, 0, WAITS.index("slot")].sum() > 0


def test_store_and_prefill_worker_are_wait_reasons() -> None:
    shared = world(stored(), router=RouterConfig(policy="round_robin"), store=SharedStore)
    run = shared.run(conversations(8, turns=3))
    require_complete_waits(run)
    assert mean(run, "store", 0) > 0 and mean(run, "transfer") == 0
    run = world(*pair()).run(conversations(8, turns=2))
    require_complete_waits(run)
    assert mean(run, "transfer", 0) > mean(run, "computing", 0) > 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 10)), max_size=30))
def test_waits_add_up_to_elapsed_time(events: list[tuple[int, float]]) -> None:
    now, phases, first = [5.0], [[0.0] * 3], []
    account = WaitAccount(lambda: now[0])
    read = 0.0
    for kind, seconds in events:
        now[0] += seconds
        phases[0][kind % 3] += seconds * (0.5 if kind == 7 else 1.0)
        if kind == 0:
            account.wait_for([FRONT, STEP, RESTART][int(seconds) % 3])
        elif kind == 1:
            phases[0] = [0.0] * 3
            account.enter((lambda: tuple(phases[0])) if seconds < 9 else lambda: None)
        elif kind == 2 and not first:
            account.begin_again()
        elif kind == 3:
            read = max(read, now[0] + seconds % 1)
            account.record(tuple(phases[0]) if seconds < 9 else None, read)
        elif kind == 4 and not first:
            read = max(read, now[0] + seconds % 1)
            account.first_token(read)
            first.append(read)
    before, between = account.end()
    assert min(before) >= 0 and min(between) >= 0
    first_delivered = bool(first) and first[0] <= now[0]
    assert sum(before) == pytest.approx((first[0] if first_delivered else now[0]) - 5.0)
    assert sum(before) + sum(between) == pytest.approx(now[0] - 5.0)
