"""Nothing that a store raises gets past its line, and a store that hangs is left alone."""

from __future__ import annotations

import logging

import pytest

from fd_core.kv.stores.contract import StoreError, Trouble
from fd_core.kv.tiers.line import StoreLine
from fd_core.kv.tiers.stats import Counters

from .scripted import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def line(counters, clock) -> StoreLine:
    return StoreLine("scripted://host", counters, clock)


def failing(error):
    def do(timeout):
        raise error

    return do


def test_a_result_passes_and_the_call_is_told_its_time(line) -> None:
    assert line.call("get", 0.5, lambda timeout: timeout * 2) == 1.0


@pytest.mark.parametrize("trouble", [Trouble.TIMEOUT, Trouble.UNREACHABLE])
def test_an_unreachable_store_is_left_alone_at_once(line, counters, clock, trouble) -> None:
    assert line.call("get", 0.5, failing(StoreError(trouble, "secret"))) is None
    assert line.state == "open" and not line.ready()
    assert line.call("get", 0.5, lambda timeout: 1 / 0) is None
    clock.now += 1.0
    assert line.ready()
    assert line.call("get", 0.5, lambda timeout: 7) == 7
    assert line.state == "closed"
    assert counters.snapshot().store_errors == {trouble: 1}


def test_other_troubles_are_tolerated_twice(line, counters) -> None:
    for expected in ("closed", "closed", "open"):
        line.call("put", 0.5, failing(StoreError(Trouble.FULL, "full")))
        assert line.state == expected
    assert counters.snapshot().store_errors == {"full": 3}


def test_a_bad_key_does_not_shut_the_store(line, counters) -> None:
    for _ in range(5):
        line.call("get", 0.5, failing(StoreError(Trouble.MALFORMED, "a list")))
    assert line.state == "closed" and counters.snapshot().store_errors == {"malformed": 5}


def test_whatever_a_strange_store_raises_is_a_failure_logged_once_without_its_words(line, counters, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        line.call("get", 0.5, failing(KeyError("secret words")))
        line.call("get", 0.5, failing(KeyError("secret words")))
        line.call("put", 0.5, failing(StoreError("nonsense", "secret words")))
    assert counters.snapshot().store_errors == {"other": 3}
    assert caplog.text.count("KeyError") == 1
    assert "secret" not in caplog.text


def test_a_call_that_hangs_opens_the_breaker_once_and_keeps_the_store_shut_until_it_returns(
    line, counters, clock
) -> None:
    def hang(timeout):
        clock.now += timeout
        assert line.ready()
        clock.now += 0.2
        assert not line.ready() and not line.ready()
        assert line.state == "open"
        clock.now += 60.0
        assert not line.ready()
        raise StoreError(Trouble.TIMEOUT, "at last")

    assert line.call("get", 0.5, hang) is None
    assert counters.snapshot().store_errors == {"timeout": 1}
    assert line.ready()
    assert line.call("get", 0.5, lambda timeout: 7) == 7 and line.state == "closed"


def test_one_call_at_a_time_probes(line, clock) -> None:
    line.call("get", 0.5, failing(StoreError(Trouble.TIMEOUT, "")))
    clock.now += 1.0
    seen = []
    line.call("get", 0.5, lambda timeout: seen.append((line.state, line.ready())))
    assert seen == [("half_open", False)]
