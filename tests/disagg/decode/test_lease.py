import math

import pytest

from fd_core.disagg.decode.lease import DecodeLease
from fd_core.disagg.lease import Action, DecodeEnd, SendMessage, TakePiece, commit_digest
from fd_core.disagg.messages import (
    AbortLease,
    Accept,
    Commit,
    Confirm,
    Credit,
    FromPrefill,
    Heartbeat,
    KVPiece,
    Open,
    Refuse,
)
from tests.disagg.world import opening

SILENCE = 8.0
OPEN = opening(7, 2, first=1, idle_timeout=SILENCE)
NAME = OPEN.lease
TOKENS = OPEN.job.num_tokens
DIGESTS = {1: b"a" * 16, 2: b"b" * 16}
COMMIT = Commit(NAME, TOKENS, commit_digest(DIGESTS), 4)


def piece(index: int) -> KVPiece:
    return KVPiece(NAME, index, DIGESTS.get(index, b""))


def open_lease(message: Open = OPEN, *, longest: float = 100.0) -> DecodeLease:
    return DecodeLease(message, longest=longest, now=0.0)


def with_piece(lease: DecodeLease, index: int, now: float = 0.0) -> list[Action]:
    assert lease.receive(piece(index), now) == [TakePiece(piece(index))]
    return lease.copied(index, DIGESTS[index], now)


def abort_and(outcome: str, actions: list[Action]) -> str:
    """Return the reason, which is also sent to the other side."""
    sent, end = actions
    assert isinstance(sent, SendMessage) and isinstance(sent.message, AbortLease)
    assert isinstance(end, DecodeEnd) and end.outcome == outcome
    assert sent.message.reason == end.reason
    return end.reason


TRANSFERRED = [SendMessage(Confirm(NAME)), DecodeEnd("transferred", "")]


def test_pieces_then_commit_complete_the_lease() -> None:
    lease = open_lease()
    assert lease.receive(Accept(NAME), 0.0) == []
    assert with_piece(lease, 1) == [SendMessage(Credit(NAME, 1))]
    assert with_piece(lease, 2) == [SendMessage(Credit(NAME, 2))]
    assert lease.outcome is None
    assert lease.receive(COMMIT, 0.0) == TRANSFERRED
    assert (lease.outcome, lease.cached, lease.next_tick) == ("transferred", 4, math.inf)


def test_reverse_order_completes_the_lease() -> None:
    lease = open_lease()
    assert lease.receive(COMMIT, 0.0) == []
    assert with_piece(lease, 2) == [SendMessage(Credit(NAME, 1))]
    assert with_piece(lease, 1) == TRANSFERRED


def test_credit_counts_copied_pieces_not_received_ones() -> None:
    lease = open_lease()
    lease.receive(piece(1), 0.0)
    lease.receive(piece(2), 0.0)
    assert lease.copied(2, DIGESTS[2], 0.0) == [SendMessage(Credit(NAME, 1))]


def test_credit_is_batched_to_half_a_window() -> None:
    lease = open_lease(opening(7, 5, first=1, window=4))
    for index in (1, 2, 3, 4):
        lease.receive(piece(index), 0.0)
    sent = [lease.copied(index, b"c" * 16, 0.0) for index in (1, 2, 3)]
    assert sent == [[], [SendMessage(Credit(NAME, 2))], []]
    assert lease.tick(SILENCE / 4) == [SendMessage(Credit(NAME, 3))], "pending credit is sent in time"
    assert lease.copied(4, b"c" * 16, SILENCE / 4) == [SendMessage(Credit(NAME, 4))], "nothing else is in flight"


@pytest.mark.law("6.2")
def test_duplicate_piece_is_ignored() -> None:
    lease = open_lease()
    lease.receive(piece(1), 0.0)
    assert lease.receive(piece(1), 0.0) == []
    lease.copied(1, DIGESTS[1], 0.0)
    assert lease.receive(piece(1), 0.0) == []
    assert lease.copied(1, b"z" * 16, 0.0) == []
    assert with_piece(lease, 2) == [SendMessage(Credit(NAME, 2))]
    assert lease.receive(COMMIT, 0.0) == TRANSFERRED


@pytest.mark.parametrize("index", [-1, 0, 3, 2**40])
def test_unwanted_piece_is_ignored(index: int) -> None:
    assert open_lease().receive(KVPiece(NAME, index, b""), 0.0) == []


def test_copying_an_unreceived_piece_is_an_error() -> None:
    lease = open_lease()
    assert lease.copied(1, DIGESTS[1], 0.0) == []
    assert lease.spoiled(1, "?") == []
    assert lease.outcome is None


@pytest.mark.law("6")
def test_pieces_beyond_window_are_damage() -> None:
    lease = open_lease(opening(7, 2, first=1, window=1))
    lease.receive(piece(1), 0.0)
    assert "at most 1 pieces" in abort_and("damaged", lease.receive(piece(2), 0.0))


def test_corrupt_piece_is_damage() -> None:
    lease = open_lease()
    lease.receive(piece(1), 0.0)
    assert abort_and("damaged", lease.spoiled(1, "its digest is wrong")) == "piece 1: its digest is wrong"


@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS + 1, 0, -1])
def test_commit_of_other_tokens_is_damage(tokens: int) -> None:
    lease = open_lease()
    commit = Commit(NAME, tokens, COMMIT.digest)
    assert f"got {tokens}" in abort_and("damaged", lease.receive(commit, 0.0))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.law("6.2")
def test_commit_with_other_digest_is_damage(first: bool) -> None:
    lease = open_lease()
    commit = Commit(NAME, TOKENS, commit_digest(DIGESTS | {2: b"c" * 16}))
    if first:
        lease.receive(commit, 0.0)
    with_piece(lease, 1)
    actions = with_piece(lease, 2)
    abort_and("damaged", actions if first else lease.receive(commit, 0.0))


def test_digest_covers_copied_pieces() -> None:
    lease = open_lease()
    lease.receive(COMMIT, 0.0)
    lease.receive(piece(1), 0.0)
    lease.copied(1, b"?" * 16, 0.0)
    lease.receive(piece(2), 0.0)
    abort_and("damaged", lease.copied(2, DIGESTS[2], 0.0))


def test_first_commit_counts() -> None:
    lease = open_lease()
    lease.receive(COMMIT, 0.0)
    assert lease.receive(Commit(NAME, TOKENS, b"?" * 16), 0.0) == []
    with_piece(lease, 1)
    assert with_piece(lease, 2) == TRANSFERRED


@pytest.mark.parametrize(("reported", "cached"), [(-5, 0), (0, 0), (TOKENS, TOKENS), (10**9, TOKENS)])
def test_cached_tokens_are_capped_at_prompt_length(reported: int, cached: int) -> None:
    lease = open_lease()
    with_piece(lease, 1)
    with_piece(lease, 2)
    lease.receive(Commit(NAME, TOKENS, COMMIT.digest, reported), 0.0)
    assert lease.cached == cached


@pytest.mark.parametrize(
    ("given", "reason"), [("--block-size is 16", "--block-size is 16"), ("", "the prefill worker gave no reason")]
)
def test_refusal_is_reported_with_reason(given: str, reason: str) -> None:
    assert open_lease().receive(Refuse(NAME, given), 0.0) == [DecodeEnd("refused", reason)]


@pytest.mark.parametrize(
    ("given", "reason"), [("out of room", "out of room"), ("", "the prefill worker aborted the lease")]
)
def test_peer_abort_is_a_loss(given: str, reason: str) -> None:
    assert open_lease().receive(AbortLease(NAME, given), 0.0) == [DecodeEnd("lost", reason)]


def test_disconnect_is_a_loss() -> None:
    assert open_lease().disconnected("disconnected") == [DecodeEnd("lost", "disconnected")]


def test_abort_is_sent_to_the_peer() -> None:
    abort_and("aborted", open_lease().abort())


def test_ended_lease_ignores_events() -> None:
    lease = open_lease()
    lease.receive(piece(1), 0.0)
    lease.abort()
    messages: list[FromPrefill] = [Accept(NAME), Refuse(NAME, ""), piece(2), COMMIT, Heartbeat(NAME), AbortLease(NAME)]
    for message in messages:
        assert lease.receive(message, 1.0) == []
    assert lease.copied(1, DIGESTS[1], 1.0) == lease.spoiled(1, "") == []
    assert lease.disconnected("") == lease.abort() == lease.tick(1e9) == []
    assert lease.outcome == "aborted"


@pytest.mark.law("6.1")
def test_silence_ends_the_lease() -> None:
    lease = open_lease()
    lease.receive(Accept(NAME), 1.0)
    assert abort_and("expired", lease.tick(1.0 + SILENCE)) == "the peer sent no message within the timeout"


def test_any_message_extends_lease_up_to_its_maximum() -> None:
    lease = open_lease(longest=30.0)
    for now in range(30):
        lease.receive(Heartbeat(NAME), float(now))
        lease.tick(float(now))
        assert lease.outcome is None
    assert "its time limit" in abort_and("expired", lease.tick(30.0))


def test_open_is_retransmitted_until_a_reply() -> None:
    lease = open_lease()
    assert lease.tick(lease.next_tick) == [SendMessage(OPEN)]
    lease.receive(Heartbeat(NAME), 3.0)
    assert lease.tick(lease.next_tick) == [SendMessage(Heartbeat(NAME))]


def test_credit_is_retransmitted_when_idle() -> None:
    lease = open_lease()
    with_piece(lease, 1, now=1.0)
    assert lease.next_tick == 1.0 + SILENCE / 4
    assert lease.tick(lease.next_tick - 0.1) == []
    assert lease.tick(lease.next_tick) == [SendMessage(Credit(NAME, 1))]
    assert lease.next_tick == 1.0 + SILENCE / 2


def test_piece_lost_before_commit_ends_the_lease() -> None:
    lease = open_lease()
    with_piece(lease, 1)
    lease.receive(COMMIT, 2.0)
    lease.receive(Heartbeat(NAME), 2.0 + SILENCE - 1)
    assert lease.next_tick <= 2.0 + SILENCE
    assert lease.outcome is None
    assert abort_and("expired", lease.tick(2.0 + SILENCE)) == "a piece was lost in transit"


def test_slow_copy_during_commit_does_not_end_the_lease() -> None:
    lease = open_lease()
    with_piece(lease, 1)
    lease.receive(piece(2), 1.0)
    lease.receive(COMMIT, 2.0)
    for now in (SILENCE, 2 * SILENCE - 1):
        lease.receive(Heartbeat(NAME), now)
        assert not any(isinstance(action, DecodeEnd) for action in lease.tick(now))
    assert lease.copied(2, DIGESTS[2], 2 * SILENCE) == TRANSFERRED
