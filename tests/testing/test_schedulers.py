"""The scheduler that comes with the core passes the kit, whose cases name the rules that they look at."""

import pytest

from fd_core.testing.law import RULES
from fd_core.testing.schedulers.target import SchedulerTarget, find_scheduler
from tests.testing.scheduler_cases import all_cases
from tests.testing.wrong.scheduling import WRONG

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


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_caught_by_the_case_that_names_its_fault(name: str) -> None:
    wrong = WRONG[name]
    said = CASES[wrong.noticed_by].run(SchedulerTarget(name, wrong.cls))
    assert said is not None, "it passes"
    assert said.startswith(f"LawBroken: law {wrong.rule}: ")


def test_there_are_many_wrong_ones() -> None:
    assert len(WRONG) >= 30
    assert {rule[0] for rule in RULES} - {"6", "7"} == {wrong.rule[0] for wrong in WRONG.values()}
