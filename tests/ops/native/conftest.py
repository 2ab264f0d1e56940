import pytest
import torch

from fd_core.ops.native import load_native_ops
from tests.models.conftest import tiny  # noqa: F401  # a fixture


@pytest.fixture(scope="session")
def native():
    """Return a function from dtype and threads to a native pack; skips where it cannot be built."""
    packs = {}

    def get(dtype="float32", threads=1):
        if (dtype, threads) not in packs:
            packs[dtype, threads] = load_native_ops(dtype, threads)
        if packs[dtype, threads] is None:
            pytest.skip("the native kernels cannot be built here")
        return packs[dtype, threads]

    return get


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
