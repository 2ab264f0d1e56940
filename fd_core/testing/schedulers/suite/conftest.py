"""Fixtures of the suite: the scheduler under test."""

from __future__ import annotations

import pytest

from fd_core.testing.kit.plugin import chosen, run_for_each
from fd_core.testing.schedulers.driver import SchedulerTarget, find_scheduler


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_for_each(metafunc, "--fd-scheduler", "scheduler")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> SchedulerTarget:
    return chosen(request.param, find_scheduler)


@pytest.fixture(autouse=True)
def what_is_lacked_is_left_out(request: pytest.FixtureRequest, target: SchedulerTarget) -> None:
    """Skip the file of a section that the scheduler declares as unsupported."""
    target.require(request.path.stem.removeprefix("test_"))
