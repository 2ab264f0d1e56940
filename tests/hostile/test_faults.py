"""Faults of real processes under load; `python -m tests.hostile.faults` makes the table of docs/reliability.md."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.hostile.faults import FAULTS, Count, Fault, judge, table, try_fault
from tests.hostile.limits import LONG

SHORT = ("engine: kill -9", "server: 40 half-open connections")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [each for each in FAULTS if LONG or each.name in SHORT], ids=lambda fault: fault.name)
def test_nothing_is_lost_that_is_not_said_and_nothing_is_wrong_or_left(fault: Fault, tmp_path: Path) -> None:
    count = asyncio.run(try_fault(fault, tmp_path))
    print(table([(fault, count)]))
    assert count.requests > 0
    assert not judge(fault, count)


@pytest.mark.parametrize("bad", [{"wrong": ["another text"]}, {"leaked": ["a block"]}])
def test_a_wrong_text_and_a_leak_are_held_against_it(bad: dict[str, list[str]]) -> None:
    assert judge(FAULTS[0], Count(tried=1, **bad))  # type: ignore[arg-type]


def test_more_lost_requests_than_promised_are_held_against_it() -> None:
    count = Count(tried=1)
    count.lost["error event worker_lost"] = 1
    assert judge(FAULTS[0], count)
    assert not judge(next(each for each in FAULTS if each.may_lose), count)
