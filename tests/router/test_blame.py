"""No sequence of hostile requests from one client makes a healthy worker unselectable."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fd_core.router.router import Router
from fd_core.router.selection import NoWorker, Selection
from tests.router.helpers import chosen, place, refused, request, router_of, serve

FATES = ("refused", "fails", "breaks", "client leaves", "no room", "prefill lost", "served")
"""Outcomes of a hostile request: equal on every worker, as healthy workers answer alike."""


@dataclass
class Hostile:
    """One hostile request in flight."""

    fate: str
    selection: Selection
    attempts: int = 1


class HostileClient(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router: Router = router_of()
        self.running: list[Hostile] = []
        self.now = 0.0

    @initialize(pairs=st.booleans(), workers=st.integers(1, 3), policy=st.sampled_from(["round_robin", "request_num"]))
    def start(self, pairs: bool, workers: int, policy: str) -> None:
        kinds = {"prefill": workers, "decode": workers} if pairs else {"mixed": workers}
        self.router = router_of(**kinds, policy=policy, decode_policy=policy, circuit_failure_threshold=1)

    @rule(fate=st.sampled_from(FATES), rng=st.floats(0, 1, exclude_max=True))
    def issue(self, fate: str, rng: float) -> None:
        self.running.append(Hostile(fate, chosen(self.router.select(request(), self.now, rng))))

    @rule(which=st.integers(0, 99), rng=st.floats(0, 1, exclude_max=True))
    def proceed(self, which: int, rng: float) -> None:
        if not self.running:
            return
        one = self.running.pop(which % len(self.running))
        selection = one.selection
        with selection:
            self.apply_fate(one)
        if one.fate not in ("fails", "no room"):
            return
        following = self.router.retry(selection, self.now, rng)
        if one.fate == "fails":
            assert isinstance(following, NoWorker) or one.attempts == 1, "a third worker was tried"
        if isinstance(following, Selection):
            self.running.append(Hostile(one.fate, following, one.attempts + 1))

    def apply_fate(self, one: Hostile) -> None:
        router, selection, now = self.router, one.selection, self.now
        if one.fate == "prefill lost" and selection.mode == "pd":
            router.failed(selection, selection.prefill, now)
        if one.fate in ("breaks", "served"):
            selection.first_token()
        if one.fate in ("fails", "breaks"):
            router.failed(selection, selection.decode, now)
        elif one.fate == "no room":
            router.declined(selection, selection.decode)
        elif one.fate == "served":
            router.served(selection, now)

    @rule()
    def other_client_is_served(self) -> None:
        serve(self.router, now=self.now)

    @rule(seconds=st.sampled_from([0.5, 2.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_worker_is_selectable(self) -> None:
        shown = self.router.snapshot().workers
        assert {each.circuit for each in shown} <= {"closed"}


HostileClient.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestHostileClient = HostileClient.TestCase


@pytest.mark.law("7.3")
def test_failure_counts_if_another_worker_then_serves() -> None:
    router = router_of(mixed=2, policy="round_robin", circuit_failure_threshold=2)
    bad = place(router).decode
    for _ in range(2):
        first = place(router)
        while first.decode != bad:
            first.release()
            first = place(router)
        with first:
            router.failed(first, bad, 0.0)
        assert {each.circuit for each in router.snapshot().workers} == {"closed"}
        with chosen(router.retry(first, 0.0, 0.0)) as second:
            second.first_token()
            router.served(second, 0.0)
    assert {each.worker: each.circuit for each in router.snapshot().workers}[bad] == "open"


def test_failed_trial_doubles_the_open_time() -> None:
    router = router_of(mixed=2, policy="round_robin", circuit_open_secs=4)
    with place(router) as first:
        bad = first.decode
        router.failed(first, bad, 0.0, severe=True)
    trial = next(one for one in (place(router, now=4.0) for _ in range(2)) if one.decode == bad)
    with trial:
        router.failed(trial, bad, 4.0)
    with chosen(router.retry(trial, 4.0, 0.0)) as second:
        router.served(second, 4.0)
    member = router.registry.member(bad)
    assert member is not None and member.circuit.remaining(4.0) == 8.0


def test_failed_prefill_side_is_blamed_once_the_answer_succeeds() -> None:
    router = router_of(prefill=1, decode=1, circuit_failure_threshold=1)
    with place(router) as selection:
        router.failed(selection, selection.prefill, 0.0)
        assert {each.circuit for each in router.snapshot().workers} == {"closed"}
        router.served(selection, 0.0)
    circuits = {each.worker.role: each.circuit for each in router.snapshot().workers}
    assert circuits == {"prefill": "open", "decode": "closed"}


@pytest.mark.law("7.3")
@pytest.mark.parametrize("count", [2, 5])
def test_request_that_fails_twice_is_not_retried(count: int) -> None:
    router = router_of(mixed=count, max_attempts=5)
    with place(router) as first:
        router.failed(first, first.decode, 0.0)
    with chosen(router.retry(first, 0.0, 0.0)) as second:
        router.failed(second, second.decode, 0.0)
    answer = refused(router.retry(second, 0.0, 0.0))
    assert (answer.reason, answer.status, answer.retry_after) == ("failed_twice", 502, None)


def test_unreachable_workers_do_not_use_up_the_retry() -> None:
    router = router_of(mixed=4, max_attempts=4)
    selection = place(router)
    for severe in (True, True, False):
        with selection:
            router.failed(selection, selection.decode, 0.0, severe=severe)
        selection = chosen(router.retry(selection, 0.0, 0.0))
