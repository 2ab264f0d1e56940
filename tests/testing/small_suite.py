"""A suite of a few tests, for tests of the options of `fdcore conformance`; it tests no plugin."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from fd_core.testing.axes.covering import Axis, Case
from fd_core.testing.axes.parts import KitCase, Part


def check(wrong: bool, case: Case) -> None:
    assert not (wrong and case["rows"] == 65 and case["wide"]), "row 64 is missing"


SMALL = Part("small", (Axis("rows", (1, 2, 64, 65)), Axis("wide", (False, True)), Axis("bits", (8, 4))), check)
OTHER = Part("other", (Axis("columns", (1, 2)),), check)


@pytest.mark.fd_cases(SMALL)
def test_case(case: KitCase) -> None:
    case.check("case" in os.environ.get("FD_SMALL_WRONG", ""), "fdcore conformance small")


@pytest.mark.fd_cases(OTHER)
def test_other_case(case: KitCase) -> None:
    case.check(False, "fdcore conformance small")


@pytest.mark.fd_alone
def test_alone() -> None:
    assert "PYTEST_XDIST_WORKER" not in os.environ
    assert "schemathesis" not in sys.modules  # a plugin of pytest that a run of the kit does not need


@pytest.mark.parametrize("number", range(4))
def test_shared(number: int) -> None:
    wrong = os.environ.get("FD_SMALL_WRONG", "")
    if wrong == "crash" and number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    assert "shared" not in wrong or number != 1, "1 is wrong"
