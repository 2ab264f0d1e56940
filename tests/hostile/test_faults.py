"""Faults of real processes under load; `python -m tests.hostile.faults` makes the table of the reliability page."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from tests.hostile.faults import FAULTS, Blow, Count, Fault, NotTried, Scene, counted, judge, table, try_fault
from tests.hostile.limits import LONG

SHORT = ("engine: kill -9",)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [each for each in FAULTS if LONG or each.name in SHORT], ids=lambda fault: fault.name)
def test_nothing_is_lost_that_is_not_said_and_nothing_is_wrong_or_left(fault: Fault, tmp_path: Path) -> None:
    count = asyncio.run(try_fault(fault, tmp_path))
    print(table([(fault, count)]))
    assert count.requests > 0
    assert not judge(fault, count)


@pytest.mark.parametrize("bad", [{"wrong": ["another text"]}, {"leaked": ["a block"]}])
def test_a_wrong_text_and_a_leak_are_held_against_it(bad: dict[str, list[str]]) -> None:
    assert judge(FAULTS[0], Count(tried=1, **bad))  # type: ignore[arg-type]


def test_a_request_that_no_ending_process_had_may_not_be_lost() -> None:
    fault = next(each for each in FAULTS if each.loses == "what was sent")
    count = Count(tried=1, in_hand=8)
    count.lost["connection ClientPayloadError"] = 8
    assert not judge(fault, count)
    count.lost["connection ClientPayloadError"] += 1
    assert judge(fault, count)
    assert judge(fault, Count(tried=1, in_hand=8, needless=["lost, and nobody had it"]))


def test_a_process_is_excused_for_what_it_had_before_its_end() -> None:
    blow = Blow(10.0, 11.0)
    assert blow.excuses(9.0, 10.5)
    assert not blow.excuses(9.0, 9.5), "lost before it"
    assert not blow.excuses(11.5, 12.0), "begun after it"
    assert not blow.excuses(None, 10.5), "never with it"


def test_a_fault_that_was_not_tried_proves_nothing() -> None:
    assert judge(FAULTS[0], Count())


def test_a_fault_without_effect_is_not_tried() -> None:
    class Idle:
        server = None

        async def metrics(self, _: object) -> dict[str, float]:
            return {"accept_errors_total": 0.0}

    with pytest.raises(NotTried, match="accept_errors_total went from 0 to 0"):
        asyncio.run(counted(cast("Scene", Idle()), "accept_errors_total", 0, 1, seconds=0.1))
