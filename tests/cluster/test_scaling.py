"""Proposals of the `load` policy, and its time-to-first-token input."""

from __future__ import annotations

from typing import Any

import pytest

from fd_core.cluster.deployment import FirstTokens, late_first_token
from fd_core.cluster.scaling import GroupLoad, LoadPolicy, quantile
from fd_core.errors import ConfigError


def load(ready: int, **changes: Any) -> GroupLoad:
    given: dict[str, Any] = {
        "role": "mixed",
        "target": ready,
        "ready": ready,
        "slots": 16 * ready,
        "running": 12 * ready,
    }
    return GroupLoad(**given | changes)


def proposals(policy: LoadPolicy, seen: GroupLoad, seconds: int) -> list[int]:
    return [policy.propose(seen, float(now)) for now in range(seconds)]


@pytest.mark.parametrize(
    "much", [{"waiting": 5}, {"kv_usage": 0.95}, {"ttft_seconds": 2.5}], ids=["queue", "kv", "first_token"]
)
def test_sustained_overload_scales_up(much: dict[str, Any]) -> None:
    policy = LoadPolicy({"ttft-seconds": 2, "up-seconds": 5})
    assert proposals(policy, load(2, **much), 6) == [2, 2, 2, 2, 2, 3]


def test_momentary_overload_is_ignored() -> None:
    policy = LoadPolicy({"up-seconds": 5})
    seen = [load(2, waiting=50 if now % 4 else 0) for now in range(40)]
    assert {policy.propose(each, float(now)) for now, each in enumerate(seen)} == {2}


def test_scale_up_at_most_doubles() -> None:
    assert proposals(LoadPolicy({"up-seconds": 0}), load(3, waiting=1000), 1) == [6]


def test_no_scale_up_while_workers_start() -> None:
    assert set(proposals(LoadPolicy({"up-seconds": 0}), load(1, target=3, waiting=1000), 20)) == {3}


def test_sustained_room_removes_one_worker() -> None:
    policy = LoadPolicy({"down-seconds": 10})
    assert proposals(policy, load(3, running=22, kv_usage=0.4), 12) == [*[3] * 10, 2, 3]


@pytest.mark.parametrize(
    "full",
    [{"running": 23}, {"waiting": 1}, {"kv_usage": 0.43}, {"ttft_seconds": 1.5}],
    ids=lambda full: next(iter(full)),
)
def test_needed_worker_is_not_removed(full: dict[str, Any]) -> None:
    policy = LoadPolicy({"down-seconds": 10, "ttft-seconds": 2})
    assert set(proposals(policy, load(3, **{"running": 2} | full), 60)) == {3}


def test_last_worker_is_not_removed() -> None:
    assert set(proposals(LoadPolicy({"down-seconds": 1}), load(1, running=0), 60)) == {1}


@pytest.mark.parametrize("options", [{"wating": 1}, {"waiting": 0}, {"room": "x"}])
def test_invalid_options_are_rejected_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LoadPolicy(options)


def test_quantile_is_the_bucket_bound() -> None:
    assert quantile(0.9, (1, 2, 4), (8, 1, 1, 0)) == 2
    assert quantile(0.9, (1, 2, 4), (0, 0, 0, 5)) == 8
    assert quantile(0.9, (1, 2, 4), (0, 0, 0, 0)) is None


def test_ttft_uses_last_30_s_of_the_current_process() -> None:
    first, other = FirstTokens(), FirstTokens()
    for now in range(100):
        first.add(float(now), (1.0, 2.0), (now if now < 50 else 50, 0, max(now - 69, 0)))
    assert first.counts == [0, 0, 30]
    other.add(0.0, (1.0, 2.0), (70, 0, 0))
    other.add(1.0, (1.0, 2.0), (1, 0, 0))
    assert other.counts == [0, 0, 0]
    assert late_first_token([first, other, FirstTokens()]) == 4.0
    assert late_first_token([FirstTokens()]) is None
