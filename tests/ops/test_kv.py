"""The kit's cases of caches, on every pack."""

from fd_core.testing.suite.kv.test_kv import (  # noqa: F401 -- the cases
    test_blocks_are_restored_bit_for_bit,
    test_blocks_of_another_type_are_refused,
)
from fd_core.testing.suite.kv.test_quantized_kv import (  # noqa: F401 -- the cases
    kv_dtype,
    test_quantized_blocks_are_restored_bit_for_bit,
)
