import math
from hashlib import blake2b

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.disagg.lease import Clock, commit_digest, requested_pieces, validate_open
from fd_core.disagg.messages import Open
from fd_core.types import MAX_JOB_PIXELS, Image
from tests.disagg.world import opening

DIGESTS = st.dictionaries(st.integers(0, 2**31 - 1), st.binary(min_size=16, max_size=16), max_size=5)


def changed(**fields: object) -> Open:
    """Return an `Open` with changed fields, its own or those of its job."""
    plain = opening(1, 2)
    of_job = {name: fields.pop(name) for name in plain.job.__struct_fields__ if name in fields}
    return msgspec.structs.replace(plain, job=msgspec.structs.replace(plain.job, **of_job), **fields)


@given(digests=DIGESTS)
def test_commit_digest_is_independent_of_arrival_order(digests: dict[int, bytes]) -> None:
    assert commit_digest(digests) == commit_digest(dict(reversed(digests.items())))


@given(one=DIGESTS, other=DIGESTS)
def test_commit_digest_covers_indexes_and_digests(one: dict[int, bytes], other: dict[int, bytes]) -> None:
    assert (commit_digest(one) == commit_digest(other)) == (one == other)


def test_commit_digest_is_stable_between_versions() -> None:
    expected = blake2b(b"\0\0\0\0" + b"a" * 16 + b"\1\0\0\0" + b"b" * 16, digest_size=16).digest()
    assert commit_digest({1: b"b" * 16, 0: b"a" * 16}) == expected


@pytest.mark.parametrize(
    ("tokens", "first", "indices"),
    [(1, 0, [0]), (2, 0, [0]), (3, 0, [0, 1]), (4, 1, [1]), (5, 1, [1, 2]), (4, 2, [])],
)
def test_wanted_blocks_exclude_the_held_prefix(tokens: int, first: int, indices: list[int]) -> None:
    assert [*requested_pieces(changed(tokens=bytes(4 * tokens), held_blocks=first))] == indices


def test_valid_open_passes_validation() -> None:
    assert validate_open(opening(1, 2)) is None
    assert validate_open(opening(2**128 - 1, 1, first=3, window=1, idle_timeout=0.05)) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lease": ""}, "32 hexadecimal digits"),
        ({"lease": "g" * 32}, "32 hexadecimal digits"),
        ({"lease": "A" * 32}, "32 hexadecimal digits"),
        ({"lease": "0" * 32 + "\n"}, "32 hexadecimal digits"),
        ({"lease": "\N{ARABIC-INDIC DIGIT ONE}" * 32}, "32 hexadecimal digits"),
        ({"tokens": b""}, "no KV"),
        ({"tokens": bytes(11)}, "no KV"),
        ({"held_blocks": -1}, "no KV"),
        ({"held_blocks": 2}, "no KV"),
        ({"held_blocks": 2**70}, "no KV"),
        ({"images": (Image(0, 1, bytes(15), (1, 1), bytes(3)),)}, "no digest of 16 bytes"),
        ({"images": (Image(0, 0, bytes(16), (1, 1), bytes(3)),)}, "or no tokens"),
        ({"images": (Image(0, 1, bytes(16), (1, 1), bytes(MAX_JOB_PIXELS // 2 + 1)),) * 2}, "67108864 bytes of pixels"),
        ({"window": 0}, "window"),
        ({"idle_timeout": 0.0}, "0.05 to 3600 seconds"),
        ({"idle_timeout": -1.0}, "0.05 to 3600 seconds"),
        ({"idle_timeout": math.nan}, "0.05 to 3600 seconds"),
        ({"idle_timeout": math.inf}, "0.05 to 3600 seconds"),
    ],
)
def test_invalid_open_is_rejected_with_reason(fields: dict[str, object], words: str) -> None:
    assert words in str(validate_open(changed(**fields)))


def test_four_heartbeats_per_silence_timeout() -> None:
    clock = Clock(8.0, 100.0, now=50.0)
    assert clock.next == 52.0
    assert [clock.heartbeat_due(now) for now in (51.9, 52.0)] == [False, True]
    clock.sent(52.0)
    assert clock.next == 54.0
    clock.postpone(54.0)
    assert clock.next == 54.5


def test_deadline_is_silence_or_total_timeout() -> None:
    clock = Clock(8.0, 20.0, now=0.0)
    assert clock.expiry_reason(7.9) is None
    assert "no message" in str(clock.expiry_reason(8.0))
    clock.received(7.0)
    clock.received(14.0)
    assert clock.expiry_reason(19.9) is None
    assert "its time limit" in str(clock.expiry_reason(20.0))
