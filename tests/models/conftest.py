import pytest

from fd_core.testing.kit.growth import one_torch_thread
from tests.models.tiny import Tiny, write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return a function from a case of `tests.models.tiny` to its checkpoint, written once."""
    written: dict[str, Tiny] = {}

    def get(case: str) -> Tiny:
        if case not in written:
            written[case] = write_tiny(case, tmp_path_factory.mktemp(case))
        return written[case]

    return get


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    with one_torch_thread():
        yield
