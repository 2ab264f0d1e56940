"""Conformance kit of fd_core for the router policy."""

from fd_core.testing.router_policies import RouterPolicySuite


class TestSlowStart(RouterPolicySuite):
    policy = "slowstart"
