"""Forty hostile worlds; `nox -s simulate` runs twenty thousand."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator

import pytest

from tests.simulation.hostile.__main__ import main
from tests.simulation.hostile.computing import BrokenLaw
from tests.simulation.hostile.plans import draw_plan, without
from tests.simulation.hostile.session import command_of, run_session, run_world
from tests.simulation.hostile.world import HostileWorld, run_plan

WORLDS = int(os.environ.get("FD_HOSTILE_WORLDS", "40"))
FIRST = int(os.environ.get("FD_HOSTILE_FIRST", "0"))


@pytest.fixture(autouse=True)
def _logs_for_later_tests() -> Iterator[None]:
    """Restore logging: a session disables warnings for its process."""
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.law("1.1", "1.2", "1.4", "1.5", "1.7", "1.8", "1.9", "2", "3.2", "3.6", "4", "5.3", "5.5")
@pytest.mark.law("6.1", "6.3", "7.1", "7.2", "7.3", "7.4")
def test_invariants_hold_in_hostile_worlds() -> None:
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


def test_failing_world_prints_its_replay_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def settle(one: HostileWorld) -> None:
        raise BrokenLaw("9", f"{len(one.submitted)} requests of seed {one.seed} are unanswered at {one.timeline.now!r}")

    monkeypatch.setattr(HostileWorld, "settle", settle)
    session = run_session(range(8, 9))
    (command,) = re.findall(r"replay: python -m tests.simulation.hostile (.*)", str(session))
    monkeypatch.setattr(sys, "argv", ["hostile", *command.split()])
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == session.failures[0].what


def test_world_runs_without_some_clients_and_faults() -> None:
    plan = next(plan for plan in map(draw_plan, range(100)) if plan.faults and plan.accidents)
    count = len(plan.faults)
    smaller = without(plan, {"c0", "c1"}, {0, count})
    assert len(plan.conversations) - len(smaller.conversations) == 2
    assert (smaller.faults, smaller.accidents) == (plan.faults[1:], plan.accidents[1:])
    assert run_world(smaller)[1] is None
    command = command_of(11, clients=["c1", "c0"], faults=[0])
    assert command.endswith("--seed 11 --trace --without-clients c0,c1 --without-faults 0")
