"""Fixtures of the suite: the postprocessor under test."""

from __future__ import annotations

import pytest

from fd_core.errors import FdError
from fd_core.testing.postprocessors.target import PostprocessTarget, find_postprocessor


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test once for each postprocessor."""
    names: list[str] = metafunc.config.getoption("--fd-postprocess")
    if not names:
        raise pytest.UsageError("name the postprocessor to test: --fd-postprocess=NAME")
    metafunc.parametrize("target", list(dict.fromkeys(names)), indirect=True, scope="session")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> PostprocessTarget:
    """The postprocessor under test."""
    try:
        return find_postprocessor(request.param)
    except FdError as error:
        raise pytest.exit.Exception(f"{request.param}: {error}", error.exit_code) from error
