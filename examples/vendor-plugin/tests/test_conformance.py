"""The router policy keeps its contract: the conformance kit of fd_core."""

from fd_core.testing.router_policies import RouterPolicySuite


class TestSlowStart(RouterPolicySuite):
    policy = "slowstart"
