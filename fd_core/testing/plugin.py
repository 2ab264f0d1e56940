"""The pytest plugin of the conformance kit: an option, and nothing else until it is used."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fd-backend`, which `fd_core.testing.suite` reads, unless somebody else did."""
    with contextlib.suppress(ValueError):
        parser.getgroup("fd_core", "conformance kit of fd_core").addoption(
            "--fd-backend",
            action="append",
            default=[],
            metavar="NAME[:FIELD=VALUE,...]",
            help="backend for `--pyargs fd_core.testing.suite`, with engine settings if need be; may be repeated",
        )
