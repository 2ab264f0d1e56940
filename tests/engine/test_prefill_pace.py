"""The estimated cost of a prefilled token follows the measured prefill steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fd_core.engine.core import PrefillPace


def plan(*tokens: int, drafts: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        total_tokens=sum(tokens), num_tokens=np.array(tokens), num_drafts=np.full(len(tokens), drafts)
    )


def test_estimate_is_moving_average_with_weight_one_fifth() -> None:
    pace = PrefillPace(1.0)
    measured = pace.observe(plan(100), 10.0, 210.0)
    assert measured is not None and measured.token == pytest.approx(1.2)


def test_step_duration_starts_when_previous_step_completed() -> None:
    pace = PrefillPace(1.0)
    pace.observe(plan(100), 0.0, 100.0)
    measured = pace.observe(plan(100), 0.0, 200.0)
    assert measured is not None and measured.token == pytest.approx(1.0)


@pytest.mark.parametrize("step", [plan(31), plan(*[1] * 100), plan(40, *[1] * 60), plan(*[4] * 100, drafts=3)])
def test_step_with_few_prefill_tokens_is_ignored(step) -> None:
    pace = PrefillPace(1.0)
    assert pace.observe(step, 0.0, 1000.0) is None
