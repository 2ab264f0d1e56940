"""Limits of keys: tokens and requests per minute, parallel requests, and refunds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fd_core.http.access.keys import KeyAccount, KeyLimits, LimitReached, Reservation, SlidingWindow
from fd_core.http.access.record import RequestRecord

MINUTE = 60.0


def account(**limits: int) -> KeyAccount:
    return KeyAccount(KeyLimits(**limits))


def enter(key: KeyAccount, now: float) -> RequestRecord:
    key.enter(now)
    return RequestRecord(account=key)


def refusal(call: object, *args: object) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value


def test_requests_are_rejected_until_one_is_a_minute_old() -> None:
    key = account(requests_per_minute=2)
    key.enter(0.0)
    key.enter(10.0)
    error = refusal(key.enter, 20.0)
    assert (error.limited, error.limit, error.used, error.asked) == ("requests", 2, 2, 1)
    assert error.wait == pytest.approx(40.25)
    refusal(key.enter, 60.0)
    key.enter(60.25)
    refusal(key.enter, 60.25)


def test_request_may_start_when_another_ends() -> None:
    key = account(parallel_requests=1)
    running = enter(key, 0.0)
    assert refusal(key.enter, 1.0).limited == "parallel"
    running.close()
    running.close()
    key.enter(1.0)
    assert key.running == 1


def test_unused_reservation_is_refunded() -> None:
    key = account(tokens_per_minute=100)
    first = key.reserve(0.0, 90)
    assert refusal(key.reserve, 1.0, 20).wait == pytest.approx(59.25)
    first.settle(1.0, 30)
    first.settle(1.0, 0)
    assert key.tokens.used == 30
    key.reserve(1.0, 70)


def test_usage_beyond_the_reservation_is_charged_over_the_limit() -> None:
    key = account(tokens_per_minute=100)
    key.reserve(0.0, 10).settle(30.0, 150)
    assert key.tokens.used == 150
    assert refusal(key.reserve, 61.0, 1).wait == pytest.approx(29.25)
    key.reserve(90.25, 100)


def test_request_that_never_fits_has_no_wait_time() -> None:
    assert refusal(account(tokens_per_minute=100).reserve, 0.0, 101).wait is None


def test_key_without_limits_is_unlimited() -> None:
    key = account()
    for _ in range(100):
        key.enter(0.0)
        key.reserve(0.0, 10**9).settle(0.0, 10**12)
    assert key.tokens.used == key.requests.used == 0


def test_changed_limits_apply_to_the_next_request() -> None:
    key = account(requests_per_minute=1)
    key.enter(0.0)
    refusal(key.enter, 0.0)
    key.limits = KeyLimits(requests_per_minute=2)
    key.enter(0.0)
    refusal(key.enter, 0.0)


MOMENTS = st.lists(st.tuples(st.floats(0, 30, allow_nan=False), st.integers(1, 50)), max_size=60)


@given(MOMENTS)
def test_window_is_bounded_and_exact_to_one_slot(steps: list[tuple[float, int]]) -> None:
    window, now = SlidingWindow(), 0.0
    added: list[tuple[float, int]] = []
    for pause, amount in steps:
        now += pause
        window.add(now, amount)
        added.append((now, amount))
        within = sum(amount for moment, amount in added if moment > now - MINUTE)
        nearly = sum(amount for moment, amount in added if moment > now - MINUTE - 0.25)
        assert within <= window.used <= nearly
        assert len(window._slots) <= 242
    window.advance(now + 61)
    assert window.used == 0 and not window._slots and window.reset(now + 61) == 0


class Limits(RuleBasedStateMachine):
    """For any client behaviour, no minute admits more than the limit, and nothing leaks."""

    REQUESTS, TOKENS, PARALLEL = 4, 100, 3

    def __init__(self) -> None:
        super().__init__()
        self.key = account(requests_per_minute=4, tokens_per_minute=100, parallel_requests=3)
        self.now = 1000.0
        self.running: list[tuple[RequestRecord, Reservation | None, float]] = []
        self.entered: list[float] = []
        self.taken: list[tuple[float, int]] = []
        """Moment and tokens of every reservation that was settled."""

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.25, 1.0, 10.0, 59.75, 60.0, 60.25, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.floats(0, 5))
    def jump_back(self, seconds: float) -> None:
        """A clock that goes backwards never makes room."""
        used = self.key.tokens.used
        self.key.tokens.advance(self.now - seconds)
        assert self.key.tokens.used <= used

    @rule(tokens=st.integers(0, 120))
    def begin(self, tokens: int) -> None:
        try:
            record = enter(self.key, self.now)
        except LimitReached as error:
            full = len(self.running) >= self.PARALLEL
            assert full if error.limited == "parallel" else self._recent(self.entered) >= self.REQUESTS
            return
        self.entered.append(self.now)
        try:
            reservation = self.key.reserve(self.now, tokens)
        except LimitReached as error:
            assert (error.wait is None) == (tokens > self.TOKENS)
            if error.wait is not None:  # its wait is long enough, and not much longer
                later = self.key.tokens
                assert error.wait <= MINUTE + 0.25
                assert later.used + tokens > self.TOKENS
            record.close()
            return
        self.running.append((record, reservation, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        record, reservation, began = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        assert reservation is not None
        used = data.draw(st.integers(0, reservation.tokens))
        for _ in range(data.draw(st.integers(1, 2))):  # twice has the same effect as once
            reservation.settle(self.now, used)
            record.close()
        self.taken.append((began, used))

    @invariant()
    def no_minute_holds_more_than_the_limit(self) -> None:
        open_now = [(began, each.tokens) for _, each, began in self.running if each is not None]
        charged = sorted([*self.taken, *open_now])
        for begin, _ in charged:
            assert sum(tokens for moment, tokens in charged if begin <= moment < begin + MINUTE) <= self.TOKENS
        for begin in self.entered:
            assert sum(begin <= moment < begin + MINUTE for moment in self.entered) <= self.REQUESTS

    @invariant()
    def running_requests_are_counted_exactly_once(self) -> None:
        assert self.key.running == len(self.running) <= self.PARALLEL
        assert 0 <= self.key.tokens.used <= self.TOKENS

    def _recent(self, moments: list[float]) -> int:
        return sum(moment > self.now - MINUTE - 0.25 for moment in moments)

    def teardown(self) -> None:
        for record, reservation, _ in self.running:
            record.close()
            if reservation is not None:
                reservation.settle(self.now, 0)
        self.key.tokens.advance(self.now + 61)
        self.key.requests.advance(self.now + 61)
        assert (self.key.running, self.key.tokens.used, self.key.requests.used) == (0, 0, 0)


TestLimits = Limits.TestCase
TestLimits.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_request_fits_after_the_reported_wait(amounts: list[int], wanted: int) -> None:
    key, now = account(tokens_per_minute=100), 0.0
    for amount in amounts:
        now += 1.7
        try:
            key.reserve(now, amount)
        except LimitReached:
            continue
    try:
        key.reserve(now, wanted)
    except LimitReached as error:
        assert error.wait is not None
        refusal(key.reserve, now + error.wait - 0.3, wanted)
        key.reserve(now + error.wait, wanted)
