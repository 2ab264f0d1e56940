"""The kit's cases of fusions, on every pack."""

from fd_core.testing.suite.test_fusions import *  # noqa: F403 -- the cases
