"""The store guard contains all exceptions, and skips calls to a hung store."""

from __future__ import annotations

import logging

import pytest

from fd_core.effects.port import OnceLogger
from fd_core.kv.stores.contract import FailureReason, StoreError
from fd_core.kv.tiers.guarded_store import GuardedStore

from .scripted import Clock, ScriptedStore


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guarded(clock) -> GuardedStore:
    return GuardedStore(ScriptedStore(), OnceLogger(), clock)


def failing(error):
    def do(store, timeout):
        raise error

    return do


def test_result_passes_and_call_receives_deadline(guarded) -> None:
    assert guarded.call("get", 0.5, lambda store, timeout: timeout * 2) == 1.0


@pytest.mark.parametrize("trouble", [FailureReason.TIMEOUT, FailureReason.UNREACHABLE])
@pytest.mark.law("5.5")
def test_unreachable_store_opens_breaker_immediately(guarded, clock, trouble) -> None:
    assert guarded.call("get", 0.5, failing(StoreError(trouble, "secret"))) is None
    assert guarded.state == "open" and not guarded.ready()
    assert guarded.call("get", 0.5, lambda store, timeout: 1 / 0) is None
    clock.now += 1.0
    assert guarded.ready()
    assert guarded.call("get", 0.5, lambda store, timeout: 7) == 7
    assert guarded.state == "closed"
    assert guarded.errors == {trouble: 1}


def test_other_errors_are_tolerated_twice(guarded) -> None:
    for expected in ("closed", "closed", "open"):
        guarded.call("put", 0.5, failing(StoreError(FailureReason.FULL, "full")))
        assert guarded.state == expected
    assert guarded.errors == {"full": 3}


def test_bad_key_does_not_open_breaker(guarded) -> None:
    for _ in range(5):
        guarded.call("get", 0.5, failing(StoreError(FailureReason.MALFORMED, "a list")))
    assert guarded.state == "closed" and guarded.errors == {"malformed": 5}


def test_error_of_custom_store_is_logged_once_without_message(guarded, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        guarded.call("get", 0.5, failing(KeyError("secret words")))
        guarded.call("get", 0.5, failing(KeyError("secret words")))
        guarded.call("put", 0.5, failing(StoreError("nonsense", "secret words")))
    assert guarded.errors == {"other": 3}
    assert caplog.text.count("KeyError") == 1
    assert "secret" not in caplog.text


@pytest.mark.law("5.5")
def test_hung_call_keeps_breaker_open_until_it_returns(guarded, clock) -> None:
    def hang(store, timeout):
        clock.now += timeout
        assert guarded.ready()
        clock.now += 0.2
        assert not guarded.ready() and not guarded.ready()
        assert guarded.state == "open"
        clock.now += 60.0
        assert not guarded.ready()
        raise StoreError(FailureReason.TIMEOUT, "at last")

    assert guarded.call("get", 0.5, hang) is None
    assert guarded.errors == {"timeout": 1}
    assert guarded.ready()
    assert guarded.call("get", 0.5, lambda store, timeout: 7) == 7 and guarded.state == "closed"


def test_probes_run_one_at_a_time(guarded, clock) -> None:
    guarded.call("get", 0.5, failing(StoreError(FailureReason.TIMEOUT, "")))
    clock.now += 1.0
    seen = []
    guarded.call("get", 0.5, lambda store, timeout: seen.append((guarded.state, guarded.ready())))
    assert seen == [("half_open", False)]
