import math

import pytest

from fd_core.disagg.lease import Action, PrefillEnd, SendMessage, SendPiece, commit_digest
from fd_core.disagg.messages import (
    AbortLease,
    Accept,
    Commit,
    Confirm,
    Credit,
    FromDecode,
    Heartbeat,
    KVPiece,
    Open,
    Refuse,
)
from fd_core.disagg.prefill.lease import PrefillLease
from tests.disagg.world import opening

SILENCE = 8.0
OPEN = opening(7, 3, first=1, window=2, idle_timeout=SILENCE)
NAME = OPEN.lease
TOKENS = OPEN.job.num_tokens
DIGESTS = {index: bytes([index]) * 16 for index in (1, 2, 3)}
COMMIT = SendMessage(Commit(NAME, TOKENS, commit_digest(DIGESTS), 2))


def owed(message: Open = OPEN, *, longest: float = 100.0) -> PrefillLease:
    lease = PrefillLease(message, longest=longest, now=0.0)
    assert lease.accept(0.0) == [SendMessage(Accept(NAME))]
    return lease


def put(lease: PrefillLease, index: int, now: float = 0.0) -> list[Action]:
    return lease.put(index, DIGESTS[index], b"ref", now)


def piece(index: int) -> SendMessage:
    return SendMessage(KVPiece(NAME, index, DIGESTS[index], b"ref"))


def all_sent(*, credit: bool = True) -> PrefillLease:
    lease = owed(opening(7, 3, first=1, window=3))
    lease.ready(1, 3)
    for index in DIGESTS:
        put(lease, index)
    if credit:
        lease.receive(Credit(NAME, 3), 0.0)
    return lease


def abort_and(end: str, actions: list[Action], *, abort: bool = True) -> str:
    sent, last = actions
    assert isinstance(last, PrefillEnd) and (last.end, last.abort) == (end, abort)
    assert sent == SendMessage(AbortLease(NAME, last.reason))
    return last.reason


def test_computed_blocks_are_sent_within_window() -> None:
    lease = owed()
    assert lease.ready(1, 1) == [SendPiece(1)]
    assert put(lease, 1) == [piece(1)]
    assert lease.ready(2, 2) == [SendPiece(2)]
    assert put(lease, 2) == [piece(2)]
    assert lease.receive(Credit(NAME, 1), 0.0) == [SendPiece(3)]
    assert lease.finished(TOKENS, 2, 0.0) == []
    assert put(lease, 3) == [piece(3), COMMIT]
    assert lease.receive(Confirm(NAME), 0.0) == [PrefillEnd("confirmed", "", False)]
    assert (lease.ended, lease.next_tick) == ("confirmed", math.inf)


def test_commit_waits_for_last_piece_not_for_credit() -> None:
    lease = all_sent(credit=False)
    assert lease.finished(TOKENS, 2, 0.0) == [COMMIT]


def test_pending_put_counts_towards_window() -> None:
    lease = owed()
    assert lease.ready(1, 3) == [SendPiece(1), SendPiece(2)]
    assert lease.receive(Credit(NAME, 2), 0.0) == []


def test_unwanted_blocks_are_not_sent() -> None:
    assert owed().ready(0, 2) == [SendPiece(1)]
    assert owed().ready(3, 9) == [SendPiece(3)]
    assert owed().ready(0, 1) == []


def test_block_is_sent_once() -> None:
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
    assert lease.receive(Credit(NAME, 1), 0.0) == [SendPiece(2)]
    put(lease, 2)
    assert lease.receive(Credit(NAME, 1), 0.0) == []
    assert lease.receive(Credit(NAME, 2), 0.0) == [SendPiece(3)]


@pytest.mark.parametrize("taken", [-1, 0])
def test_zero_credit_is_ignored(taken: int) -> None:
    lease = owed(opening(7, 3, first=1, window=1))
    lease.ready(1, 3)
    put(lease, 1)
    assert lease.receive(Credit(NAME, taken), 0.0) == []


def test_credit_beyond_sent_pieces_is_ignored() -> None:
    lease = owed(opening(7, 3, first=1, window=1))
    lease.ready(1, 3)
    assert lease.receive(Credit(NAME, 99), 0.0) == []
    put(lease, 1)
    assert lease.receive(Credit(NAME, 99), 0.0) == [SendPiece(2)]


@pytest.mark.law("6.2")
def test_repeated_open_repeats_only_the_reply() -> None:
    lease = PrefillLease(OPEN, longest=100.0, now=0.0)
    assert lease.receive(OPEN, 0.0) == []
    lease.accept(0.0)
    lease.ready(1, 1)
    put(lease, 1)
    assert lease.receive(OPEN, 0.0) == [SendMessage(Accept(NAME))]


def test_refusal_ends_lease_without_a_request() -> None:
    lease = PrefillLease(OPEN, longest=100.0, now=0.0)
    assert lease.refuse("no room") == [SendMessage(Refuse(NAME, "no room")), PrefillEnd("refused", "no room", False)]


def test_request_without_complete_kv_ends_the_lease() -> None:
    assert abort_and("gave_up", owed().abandon("preempted"), abort=False) == "preempted"


def test_early_end_of_request_is_never_committed() -> None:
    lease = owed()
    lease.ready(1, 2)
    assert "whole prompt" in abort_and("gave_up", lease.finished(TOKENS, 0, 0.0), abort=False)


def test_failed_put_ends_lease_and_request() -> None:
    lease = owed()
    lease.ready(1, 1)
    abort_and("failed", lease.failed("disk full"))


@pytest.mark.parametrize("message", [AbortLease(NAME, "no client"), AbortLease(NAME)])
@pytest.mark.law("6.1")
def test_peer_abort_ends_lease_and_request(message: AbortLease) -> None:
    expected = message.reason or "the decode worker aborted the lease"
    assert owed().receive(message, 0.0) == [PrefillEnd("aborted", expected, True)]


def test_finished_request_is_not_aborted() -> None:
    lease = all_sent()
    lease.finished(TOKENS, 2, 0.0)
    assert lease.receive(AbortLease(NAME, "over"), 0.0) == [PrefillEnd("aborted", "over", False)]


def test_ended_lease_ignores_events() -> None:
    lease = owed()
    lease.ready(1, 1)
    lease.abandon("")
    messages: list[FromDecode] = [OPEN, Credit(NAME, 1), Confirm(NAME), Heartbeat(NAME), AbortLease(NAME)]
    for message in messages:
        assert lease.receive(message, 1.0) == []
    assert put(lease, 1) == lease.ready(2, 2) == lease.finished(TOKENS, 0, 1.0) == []
    assert lease.accept(1.0) == lease.refuse("") == lease.abandon("") == lease.failed("") == []
    assert lease.tick(1e9, working=True) == []
    assert lease.ended == "gave_up"


@pytest.mark.law("6.1")
def test_silence_ends_the_lease() -> None:
    lease = owed()
    lease.receive(Heartbeat(NAME), 1.0)
    assert (
        abort_and("expired", lease.tick(1.0 + SILENCE, working=True)) == "the peer sent no message within the timeout"
    )


def test_lease_lasts_up_to_its_maximum_while_both_sides_live() -> None:
    lease = owed(longest=30.0)
    for now in range(30):
        lease.receive(Heartbeat(NAME), float(now))
        lease.tick(float(now), working=True)
        assert lease.ended is None
    assert "its time limit" in abort_and("expired", lease.tick(30.0, working=True))


def test_heartbeats_are_sent_while_engine_works() -> None:
    lease = owed()
    assert lease.next_tick == SILENCE / 4
    assert lease.tick(lease.next_tick, working=True) == [SendMessage(Heartbeat(NAME))]
    assert lease.next_tick == SILENCE / 2


def test_no_heartbeats_while_engine_is_stalled() -> None:
    lease = owed()
    assert lease.tick(SILENCE / 4, working=False) == []
    assert SILENCE / 4 < lease.next_tick < SILENCE / 2  # polls again soon
    assert lease.tick(lease.next_tick, working=True) == [SendMessage(Heartbeat(NAME))]


def test_finished_request_needs_no_engine_progress() -> None:
    lease = owed()
    lease.ready(1, 3)
    lease.finished(TOKENS, 2, 0.0)
    assert lease.tick(SILENCE / 4, working=False) == [SendMessage(Heartbeat(NAME))]


def test_commit_is_retransmitted_until_confirmed() -> None:
    lease = all_sent()
    lease.finished(TOKENS, 2, 0.0)
    assert lease.tick(SILENCE / 4, working=False) == [COMMIT]
    assert lease.tick(SILENCE / 2, working=True) == [COMMIT]


def test_piece_without_credit_ends_the_lease() -> None:
    lease = owed()
    lease.ready(1, 1)
    put(lease, 1, now=1.0)
    lease.receive(Heartbeat(NAME), 8.5)
    assert lease.tick(8.9, working=True) != []
    assert "lost" in abort_and("expired", lease.tick(9.0, working=True))


def test_credit_for_one_piece_extends_timeout_of_others() -> None:
    lease = owed()
    lease.ready(1, 2)
    put(lease, 1)
    put(lease, 2)
    lease.receive(Credit(NAME, 1), 7.0)
    lease.receive(Heartbeat(NAME), 14.0)
    lease.tick(14.9, working=True)
    assert lease.ended is None
    lease.tick(15.0, working=True)
    assert lease.ended == "expired"
