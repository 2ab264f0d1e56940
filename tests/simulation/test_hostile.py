"""Some hundreds of hostile worlds; `nox -s simulate` runs twenty thousand."""

from __future__ import annotations

import os

from tests.simulation.hostile.plans import draw_plan, without
from tests.simulation.hostile.session import command_of, run_session, run_world
from tests.simulation.hostile.world import run_plan

WORLDS = int(os.environ.get("FD_HOSTILE_WORLDS", "120"))
FIRST = int(os.environ.get("FD_HOSTILE_FIRST", "0"))


def test_the_laws_hold_in_hostile_worlds() -> None:
    session = run_session(range(FIRST, FIRST + WORLDS), stop_after=1)
    assert not session.failures, str(session)
    rare = {"returned_with_tokens", "loads", "prefill_transferred", "retries", "engine_deaths", "drafts_accepted"}
    assert rare <= session.occurred.keys(), str(session)


def test_equal_seeds_give_equal_worlds() -> None:
    for seed in range(5):
        first, second = [], []
        run_plan(draw_plan(seed), first.append)
        run_plan(draw_plan(seed), second.append)
        assert first == second


def test_a_world_can_do_without_clients_and_faults() -> None:
    plan = draw_plan(11)
    smaller = without(plan, {"c0", "c1"}, {0})
    assert len(plan.conversations) - len(smaller.conversations) == 2
    assert run_world(smaller)[1] is None
    command = command_of(11, clients=["c1", "c0"], faults=[0])
    assert command.endswith("--seed 11 --trace --without-clients c0,c1 --without-faults 0")
