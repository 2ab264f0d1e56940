"""Measured rates, forgotten without new measurements."""

from __future__ import annotations

import pytest

from fd_core.kv.tiers.rates import Rate


def test_rate_is_a_moving_average() -> None:
    rate = Rate()
    assert rate.value(0.0) is None
    rate.add(8.0, 4, 0.0)
    assert rate.value(0.0) == 2.0
    rate.add(6.0, 1, 1.0)
    assert rate.value(1.0) == pytest.approx(3.0)
    rate.add(5.0, 0, 1.0)
    assert rate.value(1.0) == pytest.approx(3.0)


def test_old_samples_expire_after_a_minute() -> None:
    rate = Rate()
    rate.add(100.0, 1, 0.0)
    assert rate.value(60.0) == 100.0
    assert rate.value(60.1) is None
    rate.add(1.0, 1, 61.0)
    assert rate.value(61.0) == 1.0
