"""The core's router policies pass the kit, and each of these wrong ones fails the case that names its fault."""

import random
import time

import pytest
from hypothesis import Phase, settings

from fd_core.errors import PluginError
from fd_core.plugins import ROUTER_POLICY, Plugins
from fd_core.plugins.builtin import fd_register_router_policies
from fd_core.router.policies import Candidate, RequestNum, RouterPolicy
from fd_core.router.workers import RouterWorker
from fd_core.testing.router_policies import RouterPolicySuite

CORE = Plugins.discover([])


class TestPoliciesOfTheCore(RouterPolicySuite):
    @pytest.fixture(autouse=True, params=[entry.name for entry in fd_register_router_policies()])
    def name(self, request):
        self.policy = request.param

    def policy_class(self):
        return CORE.load(ROUTER_POLICY, self.policy)


class UsesRandom(RouterPolicy):
    def choose(self, context):
        return random.choice(context.candidates)


class UsesClock(RouterPolicy):
    def choose(self, context):
        return context.candidates[int(time.monotonic() / 3600) % len(context.candidates)]


class SharedState(RouterPolicy):
    calls = 0

    def choose(self, context):
        SharedState.calls += 1
        return context.candidates[self.calls % len(context.candidates)]


class Invented(RouterPolicy):
    def choose(self, context):
        return Candidate(RouterWorker("http://worker0", "mixed", 0), context.candidates[0].load)


class RemembersPrompts(RequestNum):
    def __init__(self, config):
        super().__init__(config)
        self._last = None

    def choose(self, context):
        self._last = self._last or super().choose(context)
        return self._last


class OutOfRange(RouterPolicy):
    def choose(self, context):
        return context.candidates[round(context.random * len(context.candidates))]


class KeepsSessions(RequestNum):
    def __init__(self, config):
        super().__init__(config)
        self._homes = {}

    def choose(self, context):
        chosen = super().choose(context)
        self._homes[context.session] = chosen.worker.url
        return chosen


class KeepsWorkers(RequestNum):
    def __init__(self, config):
        super().__init__(config)
        self._seen = set()

    def choose(self, context):
        self._seen.update(candidate.worker for candidate in context.candidates)
        return super().choose(context)


class RefusesLoad(RouterPolicy):
    def choose(self, context):
        return next(candidate for candidate in context.candidates if candidate.load.requests < 100)


class ServesMixedOnly(RouterPolicy):
    def choose(self, context):
        return next(candidate for candidate in context.candidates if candidate.worker.role == "mixed")


class OfAnotherKind(RouterPolicy):
    def choose(self, context):
        return 3


EQUAL = "test_it_chooses_a_candidate_and_equal_calls_give_equal_answers"
ONLY = "test_only_candidate_is_chosen_under_any_load"
FORGETS = "test_it_forgets_workers_that_are_gone_and_requests_that_are_long_past"
SERVES = "test_the_router_serves_with_it_and_counts_to_zero"


@pytest.fixture
def without_shrinking():
    """Shrinking takes long and is only useful to people."""
    settings.register_profile("as found", phases=[Phase.generate])
    before = settings.get_current_profile_name()
    settings.load_profile("as found")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize(
    "wrong, case, arguments",
    [
        (UsesRandom, EQUAL, ()),
        (UsesClock, EQUAL, ()),
        (SharedState, EQUAL, ()),
        (Invented, EQUAL, ()),
        (RemembersPrompts, EQUAL, ()),
        (OutOfRange, ONLY, (1 - 2**-53,)),
        (RefusesLoad, ONLY, (0.0,)),
        (KeepsSessions, FORGETS, ()),
        (KeepsWorkers, FORGETS, ()),
        (ServesMixedOnly, SERVES, (True,)),
    ],
)
def test_wrong_policy_fails_the_case_that_names_its_fault(wrong, case, arguments):
    suite = RouterPolicySuite()
    suite.policy_class = lambda: wrong
    with pytest.raises((AssertionError, IndexError, StopIteration)):
        getattr(suite, case)(*arguments)


@pytest.mark.parametrize("pair", [False, True])
def test_router_errors_name_the_tested_policy(pair):
    suite = RouterPolicySuite()
    suite.policy_class = lambda: OfAnotherKind
    with pytest.raises(PluginError, match="router policy OfAnotherKind chose 3, which is not a candidate"):
        getattr(suite, SERVES)(pair)
