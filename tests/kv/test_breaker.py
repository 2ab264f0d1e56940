"""Circuit breaker: opens on failures, admits one probe, and doubles its pause after each failed probe."""

from __future__ import annotations

from fd_core.kv.breaker import Breaker


def test_breaker_opens_on_severe_or_third_failure() -> None:
    severe, patient = Breaker(), Breaker()
    assert severe.failure(0.0, severe=True) and severe.state == "open"
    assert [patient.failure(0.0, severe=False) for _ in range(3)] == [False, False, True]


def test_success_resets_failure_count() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.failure(0.0, severe=False)
        breaker.failure(0.0, severe=False)
        breaker.success()
    assert breaker.state == "closed"


def test_single_call_probes() -> None:
    breaker = Breaker()
    breaker.failure(10.0, severe=True)
    assert not breaker.admit(10.9) and not breaker.ready(10.9)
    assert breaker.ready(11.0) and breaker.state == "open"
    assert breaker.admit(11.0) and breaker.state == "half_open"
    assert not breaker.admit(11.0) and not breaker.ready(99.0)
    breaker.success()
    assert breaker.admit(11.0) and breaker.state == "closed"


def test_pause_doubles_up_to_30_s_and_resets_on_success() -> None:
    breaker = Breaker()
    now, pauses = 0.0, []
    breaker.failure(now, severe=True)
    for _ in range(7):
        pauses.append(breaker.remaining(now))
        now += pauses[-1]
        assert breaker.admit(now)
        breaker.failure(now, severe=False)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    now += breaker.remaining(now)
    assert breaker.admit(now)
    breaker.success()
    breaker.failure(now, severe=True)
    assert breaker.remaining(now) == 1


def test_calls_started_before_opening_are_ignored() -> None:
    breaker = Breaker()
    breaker.failure(0.0, severe=True)
    breaker.success()
    assert breaker.state == "open"
    assert not breaker.failure(0.5, severe=True) and breaker.remaining(0.5) == 0.5
