"""Fixtures of the suite: the postprocessor under test."""

from __future__ import annotations

import pytest

from fd_core.testing.kit.choosing import chosen, run_for_each
from fd_core.testing.postprocessors.target import PostprocessTarget, find_postprocessor


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test once for each postprocessor."""
    run_for_each(metafunc, "--fd-postprocess", "postprocessor")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> PostprocessTarget:
    """The postprocessor under test."""
    return chosen(request.param, find_postprocessor)
