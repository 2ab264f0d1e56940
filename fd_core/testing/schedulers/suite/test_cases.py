"""Cases that cover every pair of values of the settings, requests and incidents of a scheduler."""

from __future__ import annotations

import pytest

from fd_core.testing.axes.covering import Axis, Value
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.schedulers.cases import SCHEDULES, SIZES
from fd_core.testing.schedulers.driver import SchedulerTarget


def _check(target: SchedulerTarget, case: KitCase) -> None:
    def supported(axis: Axis, value: Value) -> bool:
        return axis.needs not in target.lacks and not (value == "abort_loading" and "pairs" in target.lacks)

    case.with_only(supported).check(target, f"fdcore conformance --scheduler {target.name}")


@pytest.mark.law("1.1", "1.2", "1.3", "1.4", "1.5", "1.7", "2.1", "2.2", "2.6", "3.1", "3.2", "3.5", "3.6", "4", "5.3")
@pytest.mark.law("1.6", "1.8", "1.9", "3.3", "5.4", "5.5", "6.1", "6.2", "6.3", "8")
@pytest.mark.fd_cases(SCHEDULES)
def test_schedule(target: SchedulerTarget, case: KitCase) -> None:
    _check(target, case)


@pytest.mark.law("1.1", "2", "2.1", "2.2", "2.4", "2.5", "3.1", "3.2", "3.6", "4")
@pytest.mark.fd_cases(SIZES)
def test_size(target: SchedulerTarget, case: KitCase) -> None:
    _check(target, case)
