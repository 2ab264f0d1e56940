import pytest
import torch

from fd_core.ops.native.build import BuildError, load
from fd_core.ops.native.library import declare
from fd_core.ops.native.pack import NativeOps
from tests.models.conftest import tiny  # noqa: F401  # a fixture


@pytest.fixture(scope="session")
def native():
    """Return a function from dtype, threads and instruction set to a native pack; skips where it cannot be built."""
    packs = {}

    def get(dtype="float32", threads=1, isa=None):
        key = (dtype, threads, isa)
        if key not in packs:
            try:
                packs[key] = NativeOps(declare(load(isa)), dtype, threads)
            except BuildError as error:
                pytest.skip(f"the native kernels cannot be built here: {error}")
        return packs[key]

    return get


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
