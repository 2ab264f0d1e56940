"""The policies of the core pass their kits, and each wrong one fails the case that names its fault."""

import itertools
from collections import ChainMap

import pytest

from fd_core.scheduling.policies import FairShare, Fcfs, Priority
from fd_core.scheduling.victims import FewestTokens, LatestArrival
from fd_core.testing.axes.parts import cases_of
from fd_core.testing.hooks.scheduling import SchedulingPolicySuite
from fd_core.testing.hooks.victims import VictimPolicySuite
from fd_core.testing.schedulers.day import SERVERS
from tests.testing.right.policies import AgingPriority, DisplacesTheLessImportant, LeastImportant, RoundRobin
from tests.testing.right.scheduling import SHORT_DAY
from tests.testing.wrong.ordering import WRONG_ORDERS, WRONG_VICTIMS

DAYS = ["crowded", "drafts", "store"]


@pytest.mark.in_turn(5)
class TestSchedulingPolicies(SchedulingPolicySuite):
    @pytest.fixture(
        autouse=True, params=[Fcfs, Priority, FairShare, AgingPriority, DisplacesTheLessImportant, RoundRobin]
    )
    def _policy(self, request):
        self.policy_class = lambda: request.param

    @pytest.mark.soak
    @pytest.mark.parametrize("name", DAYS)
    def test_an_ordinary_day(self, name):
        super().test_an_ordinary_day(name)


class TestVictimPolicies(VictimPolicySuite):
    @pytest.fixture(autouse=True, params=[FewestTokens, LatestArrival, LeastImportant])
    def _policy(self, request):
        self.policy_class = lambda: request.param

    @pytest.mark.soak
    @pytest.mark.parametrize("name", DAYS)
    def test_an_ordinary_day(self, name):
        super().test_an_ordinary_day(name)


@pytest.mark.parametrize(
    ("suite", "right"), [(SchedulingPolicySuite, AgingPriority), (VictimPolicySuite, LeastImportant)]
)
def test_right_policy_has_a_short_day(suite, right, monkeypatch):
    monkeypatch.setitem(SERVERS, "crowded", SHORT_DAY)
    tested = suite()
    tested.policy_class = lambda: right
    tested.test_an_ordinary_day("crowded")


def named(names, value):
    return {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))


def failure_of(suite, policy):
    """Return the message with which the test that has to notice the fault of a policy fails, for any parameters."""
    tested, test = suite(), getattr(suite, policy.noticed_by)
    tested.policy_class = lambda: policy
    marks = [mark for mark in test.pytestmark if mark.name in ("parametrize", "fd_cases")]
    if marks and marks[0].name == "fd_cases":
        part = marks[0].args[0]
        calls = [lambda case=case: case.check(policy, "") for case in cases_of(part)[0]]
    else:
        values = itertools.product(*([named(mark.args[0], value) for value in mark.args[1]] for mark in marks))
        calls = [lambda chosen=chosen: test(tested, **dict(ChainMap(*chosen))) for chosen in values]
    for call in calls:
        try:
            call()
        except AssertionError as error:
            return str(error)
    return ""


def params_of(policies):
    return [
        pytest.param(each, marks=pytest.mark.timing if "_time_" in f"{each.noticed_by}_" else ()) for each in policies
    ]


@pytest.mark.in_turn(8, by=lambda policy: policy.noticed_by)
@pytest.mark.parametrize("policy", params_of(WRONG_ORDERS), ids=lambda policy: policy.__name__)
def test_wrong_scheduling_policy_fails_the_test_that_names_its_fault(policy):
    assert failure_of(SchedulingPolicySuite, policy)


@pytest.mark.in_turn(8, by=lambda policy: policy.noticed_by)
@pytest.mark.parametrize("policy", params_of(WRONG_VICTIMS), ids=lambda policy: policy.__name__)
def test_wrong_victim_policy_fails_the_test_that_names_its_fault(policy):
    assert failure_of(VictimPolicySuite, policy)
