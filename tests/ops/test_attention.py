"""The kit's cases of attention, on every pack."""

from fd_core.testing.suite.test_attention import *  # noqa: F403 -- the cases
