"""The paths of a request through the code are short, and the tour describes them correctly."""

import re
import subprocess
import sys
from typing import Final

import msgspec
import pytest

from tests.walks import TOUR, Walk

BUDGETS: Final = {
    "Chat to token": (380, 255, 58),
    "Nine tokens": (1500, 300, 80),
    "Preempted slot and back": (190, 108, 35),
    "Prefill to decode": (1363, 310, 62),
}
"""Calls, distinct functions and files that a walk may take."""
_PASSING: Final = 12
"""Functions whose calls depend on timing: a late credit, a connection that is polled."""


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    """Trace in a new process, without state of other tests."""
    command = [sys.executable, "-m", "tests.walks", "--json"]
    traced = subprocess.run(command, check=True, capture_output=True, timeout=120)
    return msgspec.json.decode(traced.stdout, type=dict[str, Walk])


@pytest.mark.parametrize("name", BUDGETS)
def test_walk_stays_within_its_budget(walks: dict[str, Walk], name: str) -> None:
    walk = walks[name]
    taken = len(walk.calls), len(walk.functions), len(walk.files)
    assert all(cost <= most for cost, most in zip(taken, BUDGETS[name], strict=True)), f"{walk.cost()}: {BUDGETS[name]}"


@pytest.mark.parametrize("name", [name for name in BUDGETS if name != "Nine tokens"])
def test_tour_names_the_functions_of_a_walk(walks: dict[str, Walk], name: str) -> None:
    """`python -m tests.walks --write` brings it up to date."""
    section = TOUR.read_text().partition(f"## {name}\n")[2].partition("\n## ")[0]
    described = set()
    for line in re.findall(r"^\d+\. (.*)", section, re.MULTILINE):
        file, *functions = re.findall(r"`([^`]+)`", line)
        described |= {(file, function) for function in functions}
    entered = walks[name].functions
    passing = set(walks[name].passing)
    assert len(entered - passing - described) <= _PASSING and len(described - entered - passing) <= _PASSING
