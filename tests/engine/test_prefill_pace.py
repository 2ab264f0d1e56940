"""What a prefilled token costs follows the steps that prefill."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fd_core.engine.core import PrefillPace


def plan(*tokens: int, drafts: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        total_tokens=sum(tokens), num_tokens=np.array(tokens), num_drafts=np.full(len(tokens), drafts)
    )


def test_the_average_moves_a_fifth_of_the_way_to_what_a_step_took() -> None:
    pace = PrefillPace(1.0)
    measured = pace.observe(plan(100), 10.0, 210.0)
    assert measured is not None and measured.token == pytest.approx(1.2)


def test_a_step_begins_when_the_one_before_it_was_answered() -> None:
    pace = PrefillPace(1.0)
    pace.observe(plan(100), 0.0, 100.0)
    measured = pace.observe(plan(100), 0.0, 200.0)
    assert measured is not None and measured.token == pytest.approx(1.0)


@pytest.mark.parametrize("step", [plan(31), plan(*[1] * 100), plan(40, *[1] * 60), plan(*[4] * 100, drafts=3)])
def test_a_step_that_hardly_prefills_says_nothing(step) -> None:
    pace = PrefillPace(1.0)
    assert pace.observe(step, 0.0, 1000.0) is None
