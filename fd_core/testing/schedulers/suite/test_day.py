"""Ordinary days of servers: what users and hosts notice, compared with the scheduler of the core."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.testing.kit.days.account import account_of
from fd_core.testing.kit.law import require
from fd_core.testing.schedulers.day import SERVERS, ServerDay, require_ordinary_day
from fd_core.testing.schedulers.driver import SchedulerTarget

_OF_CORE = 12
"""Times of the core's CPU time that a call may take."""


@pytest.mark.fd_thorough
@pytest.mark.fd_pairs
@pytest.mark.fd_alone
@pytest.mark.law("1.1", "1.2", "1.4", "1.7", "2", "2.2", "2.6", "3.1", "3.2", "3.3", "3.5", "3.6", "4", "8")
@pytest.mark.parametrize("name", SERVERS)
def test_an_ordinary_day(target: SchedulerTarget, name: str) -> None:
    server = SERVERS[name].within(target)
    require_ordinary_day(target.make, server, [server], f"the day of the server {name!r}")


@pytest.mark.timing
@pytest.mark.fd_thorough
@pytest.mark.fd_pairs
@pytest.mark.fd_alone
@pytest.mark.law("2.6")
@pytest.mark.parametrize("name", ["defaults", "store"])
def test_time_of_an_ordinary_day(target: SchedulerTarget, name: str) -> None:
    """A time, as no bytecode shows what runs in C, in units of what this machine needs, which cancels its load."""
    server, took = SERVERS[name].within(target), list[list[float]]()
    for make in (ContinuousBatchingScheduler, target.make):
        day = ServerDay(server, make)
        account_of(day.live, memory=False)
        took.append([float(np.percentile(day.took, part)) for part in (50, 99)])
    for part, right, mine in zip((50, 99), *took, strict=True):
        what = f"a call takes {1e6 * mine:.0f} us at the percentile {part}, the core's {1e6 * right:.0f}"
        require(mine <= _OF_CORE * right, "2.6", f"{what}, expected at most {_OF_CORE} times as long: the device waits")
