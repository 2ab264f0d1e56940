"""The kit's cases of sampling, on every pack."""

from fd_core.testing.suite.test_sampling import *  # noqa: F403 -- the cases
