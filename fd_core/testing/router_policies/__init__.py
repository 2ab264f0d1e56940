"""The router policy kit: what every router policy has to keep. A plugin derives a class and names its policy.

    class TestMyPolicy(RouterPolicySuite):
        policy = "mine"

`docs/extend/write-a-router-policy.md` shows a whole plugin.
"""

import pytest

pytest.register_assert_rewrite("fd_core.testing.router_policies.suite")

from fd_core.testing.router_policies.suite import RouterPolicySuite  # noqa: E402 -- after the call above

__all__ = ["RouterPolicySuite"]
