"""The ways of a request through the code are short, and the tour tells them as they are."""

import re
import subprocess
import sys
from typing import Final

import msgspec
import pytest

from tests.walks import TOUR, Walk

BUDGETS: Final = {
    "Chat to token": (380, 250, 58),
    "Nine tokens": (1500, 300, 80),
    "Preempted slot and back": (190, 105, 34),
    "Prefill to decode": (1363, 310, 62),
}
"""Calls, distinct functions and files that a walk may take."""
_PASSING: Final = 12
"""Functions that come and go with the moment: a credit that comes late, a connection that is looked at."""


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    """Trace in a process of its own, which no other test has left anything in."""
    command = [sys.executable, "-m", "tests.walks", "--json"]
    traced = subprocess.run(command, check=True, capture_output=True, timeout=120)
    return msgspec.json.decode(traced.stdout, type=dict[str, Walk])


@pytest.mark.parametrize("name", BUDGETS)
def test_a_walk_stays_within_its_budget(walks: dict[str, Walk], name: str) -> None:
    walk = walks[name]
    taken = len(walk.calls), len(walk.functions), len(walk.files)
    assert all(cost <= most for cost, most in zip(taken, BUDGETS[name], strict=True)), f"{walk.cost()}: {BUDGETS[name]}"


@pytest.mark.parametrize("name", [name for name in BUDGETS if name != "Nine tokens"])
def test_the_tour_names_what_a_walk_enters(walks: dict[str, Walk], name: str) -> None:
    """`python -m tests.walks --write` brings it up to date."""
    section = TOUR.read_text().partition(f"## {name}\n")[2].partition("\n## ")[0]
    told = set()
    for line in re.findall(r"^\d+\. (.*)", section, re.MULTILINE):
        file, *functions = re.findall(r"`([^`]+)`", line)
        told |= {(file, function) for function in functions}
    entered = walks[name].functions
    passing = set(walks[name].passing)
    assert len(entered - passing - told) <= _PASSING and len(told - entered - passing) <= _PASSING
