"""The kit's cases of caches, on every pack."""

from fd_core.testing.suite.kv.test_kv import test_blocks_of_another_type_are_refused  # noqa: F401 -- the case
