"""The kit's cases of operations, on every pack."""

from fd_core.testing.suite.test_operations import *  # noqa: F403 -- the cases
