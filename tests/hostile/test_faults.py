"""Faults of real processes under load; `python -m tests.hostile.faults` writes the table of the reliability page."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from tests.hostile.faults import FAULTS, Count, Fault, Interruption, NotTried, Scene, counted, judge, table, try_fault
from tests.hostile.limits import LONG

SHORT = ("engine: kill -9",)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [each for each in FAULTS if LONG or each.name in SHORT], ids=lambda fault: fault.name)
def test_fault_causes_no_silent_loss_wrong_text_or_leak(fault: Fault, tmp_path: Path) -> None:
    count = asyncio.run(try_fault(fault, tmp_path))
    print(table([(fault, count)]))
    assert count.requests > 0
    assert not judge(fault, count)


@pytest.mark.parametrize("bad", [{"wrong": ["another text"]}, {"leaked": ["a block"]}])
def test_judge_reports_wrong_texts_and_leaks(bad: dict[str, list[str]]) -> None:
    assert judge(FAULTS[0], Count(tried=1, **bad))  # type: ignore[arg-type]


def test_judge_reports_losses_outside_the_ended_process() -> None:
    fault = next(each for each in FAULTS if each.loses == "sent")
    count = Count(tried=1, in_hand=8)
    count.lost["connection ClientPayloadError"] = 8
    assert not judge(fault, count)
    count.lost["connection ClientPayloadError"] += 1
    assert judge(fault, count)
    assert judge(fault, Count(tried=1, in_hand=8, needless=["lost, held by no process"]))


def test_losses_are_excused_only_for_requests_held_at_the_end() -> None:
    interruption = Interruption(10.0, 11.0)
    assert interruption.excuses(9.0, 10.5)
    assert not interruption.excuses(9.0, 9.5), "lost before the interruption"
    assert not interruption.excuses(11.5, 12.0), "started after the interruption"
    assert not interruption.excuses(None, 10.5), "never held by the process"


def test_judge_reports_faults_that_were_not_tried() -> None:
    assert judge(FAULTS[0], Count())


def test_fault_without_effect_raises_not_tried() -> None:
    class Idle:
        server = None

        async def metrics(self, _: object) -> dict[str, float]:
            return {"accept_errors_total": 0.0}

    with pytest.raises(NotTried, match="accept_errors_total went from 0 to 0"):
        asyncio.run(counted(cast("Scene", Idle()), "accept_errors_total", 0, 1, seconds=0.1))
