"""The policies of the core pass their kits, and each wrong one fails the case that names its fault."""

import pytest

from fd_core.scheduling.policies import FairShare, Fcfs, Priority
from fd_core.scheduling.victims import FewestTokens, LatestArrival
from fd_core.testing.policies.scheduling import SchedulingPolicySuite
from fd_core.testing.policies.victims import VictimPolicySuite


class TestSchedulingPolicies(SchedulingPolicySuite):
    @pytest.fixture(autouse=True, params=[Fcfs, Priority, FairShare])
    def _policy(self, request):
        self.policy_class = lambda: request.param


class TestVictimPolicies(VictimPolicySuite):
    @pytest.fixture(autouse=True, params=[FewestTokens, LatestArrival])
    def _policy(self, request):
        self.policy_class = lambda: request.param
