"""The life of one request, decided here for every gateway, real or simulated."""

from __future__ import annotations

import pytest

from fd_core.router.attempts import Attempts, Unreached, is_refusal
from fd_core.router.router import Router
from fd_core.router.selection import NoWorker
from tests.router.helpers import is_idle, request, router_of


def begun(router: Router) -> Attempts[str]:
    attempts: Attempts[str] = Attempts(router, request())
    assert attempts.first(0.0, 0.0) is not None
    return attempts


@pytest.mark.law("7.3")
@pytest.mark.parametrize(
    ("status", "no_model", "elsewhere", "verdict"),
    [
        (429, False, True, "declined"),
        (503, False, True, "declined"),
        (404, True, True, "declined"),
        (404, False, False, None),
        (500, False, True, "failed"),
        (502, False, True, "failed"),
        (504, False, True, "failed"),
        (400, False, False, None),
    ],
)
def test_retryable_refusal_is_kept_and_another_worker_tried(
    status: int, no_model: bool, elsewhere: bool, verdict: str | None
) -> None:
    router = router_of(mixed=2)
    attempts = begun(router)
    first = attempts.selection
    with first:
        assert is_refusal(status) == (status != 400)
        assert attempts.refused(status, f"{status} of the first", 0.0, no_model=no_model) is elsewhere
        assert first.verdicts.get(first.decode) == verdict and first.started is not elsewhere
    if elsewhere:
        second = attempts.next(0.0, 0.0)
        assert second is not None and second.decode != first.decode and attempts.selection is second
        with second:
            attempts.lost(0.0, severe=True)
        assert attempts.next(0.0, 0.0) is None
        assert attempts.result == f"{status} of the first", "a worker's refusal takes precedence"
    assert is_idle(router) and router.snapshot().faults == 0


def test_no_worker_reason_is_returned_if_no_worker_answered() -> None:
    attempts: Attempts[str] = Attempts(router_of(), request())
    assert attempts.first(0.0, 0.0) is None
    assert isinstance(attempts.result, NoWorker) and attempts.result.reason == "none_registered"
    attempts = begun(router_of(mixed=1))
    with attempts.selection:
        attempts.lost(0.0, severe=True)
    assert attempts.next(0.0, 0.0) is None
    assert isinstance(attempts.result, NoWorker) and attempts.result.status == 503
    with pytest.raises(RuntimeError):
        _ = begun(router_of(mixed=1)).result


@pytest.mark.law("7.3")
def test_no_retry_once_the_answer_has_started() -> None:
    router = router_of(mixed=2)
    attempts = begun(router)
    with attempts.selection:
        attempts.began()
        attempts.lost(0.0)
    assert attempts.next(0.0, 0.0) is None
    assert isinstance(attempts.result, NoWorker) and attempts.result.reason == "answer_started"


@pytest.mark.law("7.2")
@pytest.mark.parametrize(("status", "blocks"), [(200, 1), (400, 0)])
def test_prefix_is_recorded_for_an_answer_and_not_for_an_error(status: int, blocks: int) -> None:
    router = router_of(mixed=1, policy="cache_aware", cache_block_size=2)
    attempts = begun(router)
    with attempts.selection:
        attempts.began()
        attempts.ended(status, 0.0)
    assert router.snapshot().index_blocks == blocks


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        ("transferred", "served"),
        ("refused", "declined"),
        *((outcome, "failed") for outcome in ("lost", "expired", "damaged")),
        *((outcome, None) for outcome in ("held", "aborted", "not_told", None)),
    ],
)
def test_prefill_outcome_is_a_verdict_on_the_prefill_worker(outcome: str | None, verdict: str | None) -> None:
    attempts = begun(router_of(prefill=1, decode=1))
    with attempts.selection as selection:
        attempts.prefilled(outcome, 0.0)
        assert selection.verdicts.get(selection.prefill) == verdict
    alone = begun(router_of(mixed=1))
    alone.prefilled(outcome, 0.0)
    assert alone.selection.verdicts == {}, "there is no prefill worker"


def test_unreachable_worker_loses_its_streams_after_a_timeout() -> None:
    unreached = Unreached(30.0)
    assert not unreached.missed("http://a", 10.0, 15.0)
    assert not unreached.missed("http://a", 35.0, 39.9)
    assert unreached.missed("http://a", 36.0, 40.0)
    unreached.reached("http://a")
    assert not unreached.missed("http://a", 41.0, 46.0)
    unreached.keep({"http://b"})
    assert not unreached.missed("http://a", 80.0, 85.0)
    unreached.forget()
    assert not unreached.missed("http://a", 115.0, 120.0)
