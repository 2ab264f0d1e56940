import math

import pytest

from fd_core.disagg.lease import Action, PrefillEnd, Say, SendPiece, commit_digest
from fd_core.disagg.messages import (
    AbortLease,
    Accept,
    Alive,
    Commit,
    Confirm,
    Credit,
    FromDecode,
    KVPiece,
    Open,
    Refuse,
)
from fd_core.disagg.prefill.lease import PrefillLease
from tests.disagg.world import opening

SILENCE = 8.0
OPEN = opening(7, 3, first=1, window=2, silence=SILENCE)
NAME = OPEN.lease
TOKENS = OPEN.job.num_tokens
DIGESTS = {index: bytes([index]) * 16 for index in (1, 2, 3)}
COMMIT = Say(Commit(NAME, TOKENS, commit_digest(DIGESTS), 2))


def owed(message: Open = OPEN, *, longest: float = 100.0) -> PrefillLease:
    lease = PrefillLease(message, longest=longest, now=0.0)
    assert lease.accept(0.0) == [Say(Accept(NAME))]
    return lease


def put(lease: PrefillLease, index: int, now: float = 0.0) -> list[Action]:
    return lease.put(index, DIGESTS[index], b"ref", now)


def piece(index: int) -> Say:
    return Say(KVPiece(NAME, index, DIGESTS[index], b"ref"))


def all_sent(*, credit: bool = True) -> PrefillLease:
    lease = owed(opening(7, 3, first=1, window=3))
    lease.ready(1, 3)
    for index in DIGESTS:
        put(lease, index)
    if credit:
        lease.heard(Credit(NAME, 3), 0.0)
    return lease


def abort_and(end: str, actions: list[Action], *, abort: bool = True) -> str:
    said, last = actions
    assert isinstance(last, PrefillEnd) and (last.end, last.abort) == (end, abort)
    assert said == Say(AbortLease(NAME, last.reason))
    return last.reason


def test_blocks_leave_as_they_are_computed_and_as_the_window_allows() -> None:
    lease = owed()
    assert lease.ready(1, 1) == [SendPiece(1)]
    assert put(lease, 1) == [piece(1)]
    assert lease.ready(2, 2) == [SendPiece(2)]
    assert put(lease, 2) == [piece(2)]
    assert lease.heard(Credit(NAME, 1), 0.0) == [SendPiece(3)]
    assert lease.finished(TOKENS, 2, 0.0) == []
    assert put(lease, 3) == [piece(3), COMMIT]
    assert lease.heard(Confirm(NAME), 0.0) == [PrefillEnd("confirmed", "", False)]
    assert (lease.ended, lease.next_tick) == ("confirmed", math.inf)


def test_a_commit_waits_for_the_last_piece_not_for_credit() -> None:
    lease = all_sent(credit=False)
    assert lease.finished(TOKENS, 2, 0.0) == [COMMIT]


def test_a_put_that_is_not_done_fills_the_window_too() -> None:
    lease = owed()
    assert lease.ready(1, 3) == [SendPiece(1), SendPiece(2)]
    assert lease.heard(Credit(NAME, 2), 0.0) == []


def test_blocks_that_nobody_wants_are_not_sent() -> None:
    assert owed().ready(0, 2) == [SendPiece(1)]
    assert owed().ready(3, 9) == [SendPiece(3)]
    assert owed().ready(0, 1) == []


def test_a_block_is_sent_once() -> None:
    lease = owed()
    assert lease.ready(1, 1) == [SendPiece(1)]
    assert lease.ready(1, 1) == []
    assert put(lease, 1) == [piece(1)]
    assert put(lease, 1) == []
    assert lease.ready(1, 1) == []


def test_credit_is_cumulative() -> None:
    lease = owed(opening(7, 3, first=1, window=1))
    lease.ready(1, 3)
    put(lease, 1)
    assert lease.heard(Credit(NAME, 1), 0.0) == [SendPiece(2)]
    put(lease, 2)
    assert lease.heard(Credit(NAME, 1), 0.0) == []
    assert lease.heard(Credit(NAME, 2), 0.0) == [SendPiece(3)]


@pytest.mark.parametrize("taken", [-1, 0])
def test_credit_for_nothing_is_none(taken: int) -> None:
    lease = owed(opening(7, 3, first=1, window=1))
    lease.ready(1, 3)
    put(lease, 1)
    assert lease.heard(Credit(NAME, taken), 0.0) == []


def test_there_is_no_credit_for_what_was_not_sent() -> None:
    lease = owed(opening(7, 3, first=1, window=1))
    lease.ready(1, 3)
    assert lease.heard(Credit(NAME, 99), 0.0) == []
    put(lease, 1)
    assert lease.heard(Credit(NAME, 99), 0.0) == [SendPiece(2)]


@pytest.mark.law("6.2")
def test_opened_again_it_repeats_its_answer_and_nothing_else() -> None:
    lease = PrefillLease(OPEN, longest=100.0, now=0.0)
    assert lease.heard(OPEN, 0.0) == []
    lease.accept(0.0)
    lease.ready(1, 1)
    put(lease, 1)
    assert lease.heard(OPEN, 0.0) == [Say(Accept(NAME))]


def test_a_refusal_ends_it_without_a_request() -> None:
    lease = PrefillLease(OPEN, longest=100.0, now=0.0)
    assert lease.refuse("no room") == [Say(Refuse(NAME, "no room")), PrefillEnd("refused", "no room", False)]


def test_a_request_that_ends_without_all_its_kv_ends_it() -> None:
    assert abort_and("gave_up", owed().gave_up("preempted"), abort=False) == "preempted"


def test_a_request_that_ends_early_without_saying_so_is_never_committed() -> None:
    lease = owed()
    lease.ready(1, 2)
    assert "whole prompt" in abort_and("gave_up", lease.finished(TOKENS, 0, 0.0), abort=False)


def test_a_put_that_fails_ends_it_and_its_request() -> None:
    lease = owed()
    lease.ready(1, 1)
    abort_and("failed", lease.failed("disk full"))


@pytest.mark.parametrize("message", [AbortLease(NAME, "nobody waits"), AbortLease(NAME)])
@pytest.mark.law("6.1")
def test_an_abort_of_the_other_side_ends_it_and_its_request(message: AbortLease) -> None:
    expected = message.reason or "the decode worker aborted the lease"
    assert owed().heard(message, 0.0) == [PrefillEnd("aborted", expected, True)]


def test_a_finished_request_is_not_aborted() -> None:
    lease = all_sent()
    lease.finished(TOKENS, 2, 0.0)
    assert lease.heard(AbortLease(NAME, "over"), 0.0) == [PrefillEnd("aborted", "over", False)]


def test_nothing_happens_after_the_end() -> None:
    lease = owed()
    lease.ready(1, 1)
    lease.gave_up("")
    heard: list[FromDecode] = [OPEN, Credit(NAME, 1), Confirm(NAME), Alive(NAME), AbortLease(NAME)]
    for message in heard:
        assert lease.heard(message, 1.0) == []
    assert put(lease, 1) == lease.ready(2, 2) == lease.finished(TOKENS, 0, 1.0) == []
    assert lease.accept(1.0) == lease.refuse("") == lease.gave_up("") == lease.failed("") == []
    assert lease.tick(1e9, working=True) == []
    assert lease.ended == "gave_up"


@pytest.mark.law("6.1")
def test_silence_ends_it() -> None:
    lease = owed()
    lease.heard(Alive(NAME), 1.0)
    assert (
        abort_and("expired", lease.tick(1.0 + SILENCE, working=True)) == "the peer sent no message within the timeout"
    )


def test_it_lasts_as_long_as_both_are_there_up_to_its_longest() -> None:
    lease = owed(longest=30.0)
    for now in range(30):
        lease.heard(Alive(NAME), float(now))
        lease.tick(float(now), working=True)
        assert lease.ended is None
    assert "its time limit" in abort_and("expired", lease.tick(30.0, working=True))


def test_it_is_alive_while_its_engine_works() -> None:
    lease = owed()
    assert lease.next_tick == SILENCE / 4
    assert lease.tick(lease.next_tick, working=True) == [Say(Alive(NAME))]
    assert lease.next_tick == SILENCE / 2


def test_it_is_not_alive_while_its_engine_stands_still() -> None:
    lease = owed()
    assert lease.tick(SILENCE / 4, working=False) == []
    assert SILENCE / 4 < lease.next_tick < SILENCE / 2  # looks again soon
    assert lease.tick(lease.next_tick, working=True) == [Say(Alive(NAME))]


def test_a_finished_request_needs_no_engine() -> None:
    lease = owed()
    lease.ready(1, 3)
    lease.finished(TOKENS, 2, 0.0)
    assert lease.tick(SILENCE / 4, working=False) == [Say(Alive(NAME))]


def test_a_commit_is_repeated_until_it_is_confirmed() -> None:
    lease = all_sent()
    lease.finished(TOKENS, 2, 0.0)
    assert lease.tick(SILENCE / 4, working=False) == [COMMIT]
    assert lease.tick(SILENCE / 2, working=True) == [COMMIT]


def test_a_piece_that_gets_no_credit_ends_it() -> None:
    lease = owed()
    lease.ready(1, 1)
    put(lease, 1, now=1.0)
    lease.heard(Alive(NAME), 8.5)
    assert lease.tick(8.9, working=True) != []
    assert "lost" in abort_and("expired", lease.tick(9.0, working=True))


def test_credit_for_one_piece_gives_the_others_time() -> None:
    lease = owed()
    lease.ready(1, 2)
    put(lease, 1)
    put(lease, 2)
    lease.heard(Credit(NAME, 1), 7.0)
    lease.heard(Alive(NAME), 14.0)
    lease.tick(14.9, working=True)
    assert lease.ended is None
    lease.tick(15.0, working=True)
    assert lease.ended == "expired"
