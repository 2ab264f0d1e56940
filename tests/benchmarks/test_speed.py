import math

import pytest
import speed
from rich.console import Console


@pytest.mark.parametrize(
    ("count", "bounds"),
    [(7, (0.0, math.inf)), (8, (0, 7)), (16, (2, 13)), (32, (8, 23))],
)
def test_interval_of_the_median_is_exact(count, bounds):
    # 99 % a look; outside are 2 of 256, 274 of 65,536 (skipping two more: 1,394), and 0.7 % with 8 on each side.
    assert speed.interval([float(value) for value in reversed(range(count))]) == bounds


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.06] * 8, "slower"),
        ([1.05] * 8, "not slower"),
        ([0.9] * 8, "not slower"),
        ([1.0] * 4 + [1.2] * 4, "not decided"),
        ([2.0] * 7, "not decided"),
    ],
)
def test_verdict_needs_the_whole_interval(ratios, expected):
    assert speed.verdict(ratios) == expected


def test_rounds_continue_until_every_comparison_is_decided():
    asked = []

    def times(count):
        asked.append(count)
        noisy = ([0.9, 1.3] * count)[:count] if count < 16 else [1.0] * count
        return {"steady": [1.0] * count, "noisy": noisy}

    assert speed.decided(times, Console(quiet=True)) == {"steady": "not slower", "noisy": "not slower"}
    assert asked == [8, 12, 16]


def test_verdict_stays_open_after_the_last_look():
    verdicts = speed.decided(lambda count: {"noisy": ([0.5, 2.0] * count)[:count]}, Console(quiet=True))
    assert verdicts == {"noisy": "not decided"}
