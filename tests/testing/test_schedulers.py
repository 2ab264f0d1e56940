"""The scheduler that comes with the core passes the kit, whose cases name the rules that they look at."""

import pytest

from fd_core.testing.law import RULES
from fd_core.testing.schedulers.target import find_scheduler
from tests.testing.scheduler_cases import all_cases

CASES = {case.name: case for case in all_cases()}
OF_THE_ENGINE = {"1.8", "2.5"}
"""Rules that are not the scheduler's to keep."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_the_continuous_scheduler_passes(name: str) -> None:
    assert CASES[name].run(find_scheduler("continuous"), examples=15) is None


def test_every_rule_of_a_scheduler_is_looked_at() -> None:
    of_schedulers = {rule for rule in RULES if rule[0] in "1234"} - OF_THE_ENGINE
    assert of_schedulers <= {rule for case in CASES.values() for rule in case.rules} <= set(RULES)
