import pytest
import torch

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
    """Tiny products are slower on several threads, and tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
