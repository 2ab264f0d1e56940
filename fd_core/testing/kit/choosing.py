"""What the conftest files of the kits share: for which plugins a suite is run, and how a missing one is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from fd_core.errors import FdError

_Found = TypeVar("_Found")


def run_for_each(metafunc: pytest.Metafunc, option: str, kind: str) -> None:
    """Run a test once for each name given with `option`; one that does not ask for `target` runs once."""
    if "target" not in metafunc.fixturenames:
        return
    names: list[str] = metafunc.config.getoption(option)
    if not names:
        raise pytest.UsageError(f"name the {kind} to test: {option}=NAME")
    metafunc.parametrize("target", list(dict.fromkeys(names)), indirect=True, scope="session")


def chosen(name: str, find: Callable[[str], _Found]) -> _Found:
    """Return what `find` finds under a name; end the run with the error's words and exit code if it finds nothing."""
    try:
        return find(name)
    except FdError as error:
        raise pytest.exit.Exception(f"{name}: {error}", error.exit_code) from error
