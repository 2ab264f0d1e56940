"""The kit's cases of attention, on every pack."""

from fd_core.testing.suite.test_attention import *  # noqa: F403 -- the cases
from fd_core.testing.suite.test_costs import (  # noqa: F401 -- the cases
    test_cost_of_attention_does_not_grow_with_the_block_table,
    test_cost_of_logits_grows_with_the_rows_that_need_them,
    test_memory_of_a_change_does_not_grow_with_the_array,
)
