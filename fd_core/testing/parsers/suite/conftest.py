"""Fixtures of the suite: the parser under test."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fd_core.plugins import REASONING_PARSER, TOOL_PARSER
from fd_core.testing.kit.plugin import chosen, run_for_each
from fd_core.testing.parsers.target import ParserTarget, find_parser


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the section for the other kind of parser."""
    other = "test_calls.py" if config.getoption("--fd-reasoning-parser") else "test_reasoning.py"
    return True if collection_path.name == other else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    reasoning = metafunc.config.getoption("--fd-reasoning-parser")
    run_for_each(metafunc, "--fd-reasoning-parser" if reasoning else "--fd-tool-parser", "parser")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> ParserTarget:
    reasoning = request.config.getoption("--fd-reasoning-parser")
    return chosen(request.param, partial(find_parser, kind=REASONING_PARSER if reasoning else TOOL_PARSER))
