"""An ordinary day: answers of many users at a time, each with its tools, compared with the core's parser."""

from __future__ import annotations

from functools import cache

import pytest

from fd_core.testing.kit.days.account import DayAccount, account_of, require_as_good
from fd_core.testing.parsers.day import PRIVATE, answers_of, core_of, day_of
from fd_core.testing.parsers.target import ParserTarget

SLACK = {"peak": 2.0, "grown": 2.0}


@cache
def _account(target: ParserTarget) -> DayAccount:
    return account_of(day_of(target, answers_of(target)), PRIVATE.encode())


@pytest.mark.law("8", "8.1", "8.2", "8.3", "8.4")
@pytest.mark.fd_alone
@pytest.mark.fd_thorough
def test_an_ordinary_day(target: ParserTarget) -> None:
    require_as_good(_account(target), _account(core_of(target)), "an ordinary day", "8.4", SLACK)
