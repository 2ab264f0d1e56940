"""An ordinary day: answers of many users at a time, each with its tools, compared with the core's parser."""

from __future__ import annotations

import pytest

from fd_core.testing.kit.days.account import account_of, require_as_good
from fd_core.testing.parsers.day import PRIVATE, answers_of, core_of, day_of
from fd_core.testing.parsers.target import ParserTarget

SLACK = {"peak": 2.0, "grown": 2.0}


@pytest.mark.law("8", "8.1", "8.2", "8.3", "8.4")
@pytest.mark.fd_alone
@pytest.mark.fd_thorough
def test_an_ordinary_day(target: ParserTarget) -> None:
    mine, core = (account_of(day_of(each, answers_of(each)), PRIVATE.encode()) for each in (target, core_of(target)))
    require_as_good(mine, core, "an ordinary day", "8.4", SLACK)
