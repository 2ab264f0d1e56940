"""The kit's cases on the native kernels."""

import pytest

from tests.ops.test_attention import *  # noqa: F403 -- the cases
from tests.ops.test_fusions import *  # noqa: F403 -- the cases
from tests.ops.test_kv import *  # noqa: F403 -- the cases
from tests.ops.test_primitives import *  # noqa: F403 -- the cases
from tests.ops.test_sampling import *  # noqa: F403 -- the cases


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def ops(request, native):
    return native(request.param)
