"""Planning does not notice whether the store is well or stopped; `benchmarks/storage_stall.py` is strict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

STEPS = 400
ROUNDS = 2
LONGEST_SECONDS = 0.2
"""A plan that waited for the shortest call of a stopped store would take 0.25 s."""
JITTER_SECONDS = 0.003
"""What other work on the machine adds to a percentile."""


@pytest.mark.timing
def test_planning_takes_as_long_with_a_stopped_store_as_with_one_that_is_well(redis_server: Any, secret: Path) -> None:
    from storage_stall import STOPPED, WELL, measure

    turns = measure(redis_server.unix_url, secret, redis_server.pid, rounds=ROUNDS, steps=STEPS, running=32)
    for row in turns.rows():
        print(*row)
    # Steps are so short that a round may be over before the first call of the stopped store has missed its deadline.
    assert turns.percentile(STOPPED, 100) < LONGEST_SECONDS + turns.percentile(WELL, 100)
    for share in (50, 95):
        assert turns.percentile(STOPPED, share) < 1.5 * turns.percentile(WELL, share) + JITTER_SECONDS
