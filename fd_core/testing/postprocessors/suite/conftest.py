"""Fixtures of the suite: the postprocessor under test."""

from __future__ import annotations

import pytest

from fd_core.testing.kit.plugin import chosen, run_for_each
from fd_core.testing.postprocessors.matrices import PostprocessTarget, find_postprocessor


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_for_each(metafunc, "--fd-postprocess", "postprocessor")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> PostprocessTarget:
    return chosen(request.param, find_postprocessor)
