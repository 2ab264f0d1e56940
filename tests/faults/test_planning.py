"""Planning takes the same time with a stopped store as with a healthy one; `benchmarks/storage_stall.py` is strict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

STEPS = 400
ROUNDS = 2
LONGEST_SECONDS = 0.2
"""A plan that waited for the shortest call to a stopped store would take 0.25 s."""
JITTER_SECONDS = 0.003
"""Allowance for other load on the machine, which raises percentiles."""


@pytest.mark.timing
def test_stopped_store_does_not_slow_down_planning(redis_server: Any, secret: Path) -> None:
    from storage_stall import STOPPED, WELL, measure

    turns = measure(redis_server.unix_url, secret, redis_server.pid, rounds=ROUNDS, steps=STEPS, running=32)
    for row in turns.rows():
        print(*row)
    # Steps are short: a round may end before the first call to the stopped store misses its deadline.
    assert turns.percentile(STOPPED, 100) < LONGEST_SECONDS + turns.percentile(WELL, 100)
    for share in (50, 95):
        assert turns.percentile(STOPPED, share) < 1.5 * turns.percentile(WELL, share) + JITTER_SECONDS
