"""The router policy kit: derive a class and name the policy, see docs/extend/write-a-router-policy.md."""

import pytest

pytest.register_assert_rewrite("fd_core.testing.router_policies.suite")

from fd_core.testing.router_policies.suite import RouterPolicySuite  # noqa: E402 -- after the call above

__all__ = ["RouterPolicySuite"]
