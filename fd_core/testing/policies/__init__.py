"""Kits for policies: derive a class from a suite and name the policy."""

import pytest

pytest.register_assert_rewrite("fd_core.testing.policies.scaling")

from fd_core.testing.policies.scaling import ScalingPolicySuite  # noqa: E402 -- after the call above

__all__ = ["ScalingPolicySuite"]
