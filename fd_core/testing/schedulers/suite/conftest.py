"""Fixtures of the suite: the scheduler under test."""

from __future__ import annotations

import pytest

from fd_core.errors import FdError
from fd_core.testing.requirements import lacks
from fd_core.testing.schedulers.cases import QUICK_EXAMPLES
from fd_core.testing.schedulers.target import SchedulerTarget, find_scheduler

_EXAMPLES = 120


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test once for each scheduler."""
    if "target" not in metafunc.fixturenames:
        return
    names: list[str] = metafunc.config.getoption("--fd-scheduler")
    if not names:
        raise pytest.UsageError("name the scheduler to test: --fd-scheduler=NAME")
    metafunc.parametrize("target", list(dict.fromkeys(names)), indirect=True, scope="session")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> SchedulerTarget:
    """The scheduler under test."""
    try:
        return find_scheduler(request.param)
    except FdError as error:
        raise pytest.exit.Exception(f"{request.param}: {error}", error.exit_code) from error


@pytest.fixture(autouse=True)
def what_is_lacked_is_left_out(request: pytest.FixtureRequest, target: SchedulerTarget) -> None:
    """Leave out the file of a section that the scheduler says it has no part for."""
    section = request.path.stem.removeprefix("test_")
    if section in target.lacks:
        lacks(target.lacks[section])


@pytest.fixture(scope="session")
def examples(request: pytest.FixtureRequest) -> int:
    """Random sequences of calls."""
    return QUICK_EXAMPLES if request.config.getoption("--fd-quick") else _EXAMPLES
