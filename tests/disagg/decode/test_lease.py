import math

import pytest

from fd_core.disagg.decode.lease import DecodeLease
from fd_core.disagg.lease import Action, DecodeEnd, Say, TakePiece, commit_digest
from fd_core.disagg.messages import (
    AbortLease,
    Accept,
    Alive,
    Commit,
    Confirm,
    Credit,
    FromPrefill,
    KVPiece,
    Open,
    Refuse,
)
from tests.disagg.world import opening

SILENCE = 8.0
OPEN = opening(7, 2, first=1, silence=SILENCE)
NAME = OPEN.lease
TOKENS = OPEN.job.num_tokens
DIGESTS = {1: b"a" * 16, 2: b"b" * 16}
COMMIT = Commit(NAME, TOKENS, commit_digest(DIGESTS), 4)


def piece(index: int) -> KVPiece:
    return KVPiece(NAME, index, DIGESTS.get(index, b""))


def open_lease(message: Open = OPEN, *, longest: float = 100.0) -> DecodeLease:
    return DecodeLease(message, longest=longest, now=0.0)


def with_piece(lease: DecodeLease, index: int, now: float = 0.0) -> list[Action]:
    assert lease.heard(piece(index), now) == [TakePiece(piece(index))]
    return lease.copied(index, DIGESTS[index], now)


def abort_and(outcome: str, actions: list[Action]) -> str:
    """Return the reason, told to the other side too."""
    said, end = actions
    assert isinstance(said, Say) and isinstance(said.message, AbortLease)
    assert isinstance(end, DecodeEnd) and end.outcome == outcome
    assert said.message.reason == end.reason
    return end.reason


TRANSFERRED = [Say(Confirm(NAME)), DecodeEnd("transferred", "")]


def test_pieces_then_commit() -> None:
    lease = open_lease()
    assert lease.heard(Accept(NAME), 0.0) == []
    assert with_piece(lease, 1) == [Say(Credit(NAME, 1))]
    assert with_piece(lease, 2) == [Say(Credit(NAME, 2))]
    assert lease.outcome is None
    assert lease.heard(COMMIT, 0.0) == TRANSFERRED
    assert (lease.outcome, lease.cached, lease.next_tick) == ("transferred", 4, math.inf)


def test_everything_backwards() -> None:
    lease = open_lease()
    assert lease.heard(COMMIT, 0.0) == []
    assert with_piece(lease, 2) == [Say(Credit(NAME, 1))]
    assert with_piece(lease, 1) == TRANSFERRED


def test_credit_is_for_what_was_copied_not_for_what_came() -> None:
    lease = open_lease()
    lease.heard(piece(1), 0.0)
    lease.heard(piece(2), 0.0)
    assert lease.copied(2, DIGESTS[2], 0.0) == [Say(Credit(NAME, 1))]


def test_pieces_that_came_together_share_a_credit_of_half_a_window() -> None:
    lease = open_lease(opening(7, 5, first=1, window=4))
    for index in (1, 2, 3, 4):
        lease.heard(piece(index), 0.0)
    said = [lease.copied(index, b"c" * 16, 0.0) for index in (1, 2, 3)]
    assert said == [[], [Say(Credit(NAME, 2))], []]
    assert lease.tick(SILENCE / 4) == [Say(Credit(NAME, 3))], "what was not said is said in time"
    assert lease.copied(4, b"c" * 16, SILENCE / 4) == [Say(Credit(NAME, 4))], "nothing else is on its way"


@pytest.mark.law("6.2")
def test_a_piece_is_taken_once() -> None:
    lease = open_lease()
    lease.heard(piece(1), 0.0)
    assert lease.heard(piece(1), 0.0) == []
    lease.copied(1, DIGESTS[1], 0.0)
    assert lease.heard(piece(1), 0.0) == []
    assert lease.copied(1, b"z" * 16, 0.0) == []
    assert with_piece(lease, 2) == [Say(Credit(NAME, 2))]
    assert lease.heard(COMMIT, 0.0) == TRANSFERRED


@pytest.mark.parametrize("index", [-1, 0, 3, 2**40])
def test_a_piece_that_nobody_wants_is_not_taken(index: int) -> None:
    assert open_lease().heard(KVPiece(NAME, index, b""), 0.0) == []


def test_what_was_never_taken_cannot_have_been_copied() -> None:
    lease = open_lease()
    assert lease.copied(1, DIGESTS[1], 0.0) == []
    assert lease.spoiled(1, "?") == []
    assert lease.outcome is None


@pytest.mark.law("6")
def test_more_pieces_than_the_window_has_are_damage() -> None:
    lease = open_lease(opening(7, 2, first=1, window=1))
    lease.heard(piece(1), 0.0)
    assert "at most 1 pieces" in abort_and("damaged", lease.heard(piece(2), 0.0))


def test_a_spoiled_piece_is_damage() -> None:
    lease = open_lease()
    lease.heard(piece(1), 0.0)
    assert abort_and("damaged", lease.spoiled(1, "its digest is wrong")) == "piece 1: its digest is wrong"


@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS + 1, 0, -1])
def test_a_commit_of_other_tokens_is_damage(tokens: int) -> None:
    lease = open_lease()
    commit = Commit(NAME, tokens, COMMIT.digest)
    assert f"got {tokens}" in abort_and("damaged", lease.heard(commit, 0.0))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.law("6.2")
def test_a_commit_that_does_not_cover_what_was_copied_is_damage(first: bool) -> None:
    lease = open_lease()
    commit = Commit(NAME, TOKENS, commit_digest(DIGESTS | {2: b"c" * 16}))
    if first:
        lease.heard(commit, 0.0)
    with_piece(lease, 1)
    actions = with_piece(lease, 2)
    abort_and("damaged", actions if first else lease.heard(commit, 0.0))


def test_what_was_copied_counts_not_what_was_announced() -> None:
    lease = open_lease()
    lease.heard(COMMIT, 0.0)
    lease.heard(piece(1), 0.0)
    lease.copied(1, b"?" * 16, 0.0)
    lease.heard(piece(2), 0.0)
    abort_and("damaged", lease.copied(2, DIGESTS[2], 0.0))


def test_the_first_commit_counts() -> None:
    lease = open_lease()
    lease.heard(COMMIT, 0.0)
    assert lease.heard(Commit(NAME, TOKENS, b"?" * 16), 0.0) == []
    with_piece(lease, 1)
    assert with_piece(lease, 2) == TRANSFERRED


@pytest.mark.parametrize(("said", "cached"), [(-5, 0), (0, 0), (TOKENS, TOKENS), (10**9, TOKENS)])
def test_no_more_tokens_were_cached_than_there_are(said: int, cached: int) -> None:
    lease = open_lease()
    with_piece(lease, 1)
    with_piece(lease, 2)
    lease.heard(Commit(NAME, TOKENS, COMMIT.digest, said), 0.0)
    assert lease.cached == cached


@pytest.mark.parametrize(
    ("given", "told"), [("--block-size is 16", "--block-size is 16"), ("", "the prefill worker gave no reason")]
)
def test_a_refusal_is_told_with_its_reason(given: str, told: str) -> None:
    assert open_lease().heard(Refuse(NAME, given), 0.0) == [DecodeEnd("refused", told)]


@pytest.mark.parametrize(
    ("given", "told"), [("out of room", "out of room"), ("", "the prefill worker aborted the lease")]
)
def test_an_abort_of_the_other_side_is_a_loss(given: str, told: str) -> None:
    assert open_lease().heard(AbortLease(NAME, given), 0.0) == [DecodeEnd("lost", told)]


def test_a_connection_that_goes_is_a_loss() -> None:
    assert open_lease().gone("disconnected") == [DecodeEnd("lost", "disconnected")]


def test_the_other_side_is_told_of_an_abort() -> None:
    abort_and("aborted", open_lease().abort())


def test_nothing_happens_after_the_end() -> None:
    lease = open_lease()
    lease.heard(piece(1), 0.0)
    lease.abort()
    heard: list[FromPrefill] = [Accept(NAME), Refuse(NAME, ""), piece(2), COMMIT, Alive(NAME), AbortLease(NAME)]
    for message in heard:
        assert lease.heard(message, 1.0) == []
    assert lease.copied(1, DIGESTS[1], 1.0) == lease.spoiled(1, "") == []
    assert lease.gone("") == lease.abort() == lease.tick(1e9) == []
    assert lease.outcome == "aborted"


@pytest.mark.law("6.1")
def test_silence_ends_it() -> None:
    lease = open_lease()
    lease.heard(Accept(NAME), 1.0)
    assert abort_and("expired", lease.tick(1.0 + SILENCE)) == "the peer sent no message within the timeout"


def test_any_word_keeps_it_alive_up_to_its_longest() -> None:
    lease = open_lease(longest=30.0)
    for now in range(30):
        lease.heard(Alive(NAME), float(now))
        lease.tick(float(now))
        assert lease.outcome is None
    assert "its time limit" in abort_and("expired", lease.tick(30.0))


def test_it_opens_again_until_it_hears_something() -> None:
    lease = open_lease()
    assert lease.tick(lease.next_tick) == [Say(OPEN)]
    lease.heard(Alive(NAME), 3.0)
    assert lease.tick(lease.next_tick) == [Say(Alive(NAME))]


def test_it_repeats_its_credit_when_it_is_quiet() -> None:
    lease = open_lease()
    with_piece(lease, 1, now=1.0)
    assert lease.next_tick == 1.0 + SILENCE / 4
    assert lease.tick(lease.next_tick - 0.1) == []
    assert lease.tick(lease.next_tick) == [Say(Credit(NAME, 1))]
    assert lease.next_tick == 1.0 + SILENCE / 2


def test_a_piece_that_was_sent_before_the_commit_and_does_not_come_ends_the_lease() -> None:
    lease = open_lease()
    with_piece(lease, 1)
    lease.heard(COMMIT, 2.0)
    lease.heard(Alive(NAME), 2.0 + SILENCE - 1)
    assert lease.next_tick <= 2.0 + SILENCE
    assert lease.outcome is None
    assert abort_and("expired", lease.tick(2.0 + SILENCE)) == "a piece was lost in transit"


def test_a_piece_that_is_being_copied_when_the_commit_comes_may_take_its_time() -> None:
    lease = open_lease()
    with_piece(lease, 1)
    lease.heard(piece(2), 1.0)
    lease.heard(COMMIT, 2.0)
    for now in (SILENCE, 2 * SILENCE - 1):
        lease.heard(Alive(NAME), now)
        assert not any(isinstance(action, DecodeEnd) for action in lease.tick(now))
    assert lease.copied(2, DIGESTS[2], 2 * SILENCE) == TRANSFERRED
