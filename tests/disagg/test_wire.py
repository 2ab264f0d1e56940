"""Sealed messages round-trip; anything else is rejected before it is parsed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.disagg import messages as m
from fd_core.disagg.lease import MAX_WINDOW
from fd_core.disagg.wire import AuthenticationError, InvalidMessage, Wire
from fd_core.kv.stores.envelope import Damaged, Envelope
from fd_core.types import MAX_JOB_PIXELS, Image, PrefillJob

from .pair import BLOCK, COMPATIBILITY, SECRET, SIZE, kv

WIRE = Wire(Envelope(SECRET), BLOCK, max_tokens=1000)
LEASE = "0123456789abcdef" * 2
JOB = PrefillJob(np.arange(9, dtype="<i4").tobytes(), lease=LEASE)
OPEN = m.Open(JOB, COMPATIBILITY, 4, 5.0, "frames", b"here")

leases = st.text("0123456789abcdef", min_size=32, max_size=32)
digests = st.binary(min_size=16, max_size=16)
numbers = st.integers(0, 2**31 - 1)
texts = st.text(max_size=100)
from_prefill = st.one_of(
    st.builds(m.Accept, leases),
    st.builds(m.Refuse, leases, texts),
    st.builds(m.KVPiece, leases, numbers, digests, st.binary(max_size=1024)),
    st.builds(m.Commit, leases, st.integers(1, 2**31 - 1), digests),
    st.builds(m.Heartbeat, leases),
    st.builds(m.AbortLease, leases, texts),
)
from_decode = st.one_of(
    st.builds(
        lambda lease, ids, held, salt, window: msgspec.structs.replace(
            OPEN,
            job=PrefillJob(np.array(ids, "<i4").tobytes(), held % -(-len(ids) // SIZE), salt, lease=lease),
            window=window,
        ),
        leases,
        st.lists(numbers, min_size=1, max_size=1000),
        numbers,
        texts,
        st.integers(1, MAX_WINDOW),
    ),
    st.builds(m.Credit, leases, numbers),
    st.builds(m.Confirm, leases),
    st.builds(m.Heartbeat, leases),
    st.builds(m.AbortLease, leases, texts),
)


@settings(deadline=None)
@given(from_decode, from_prefill)
def test_messages_round_trip(request: m.FromDecode, answer: m.FromPrefill) -> None:
    assert WIRE.open_from_decode(WIRE.seal_from_decode(request)) == request
    assert WIRE.open_from_prefill(WIRE.seal_from_prefill(answer)) == answer


@settings(deadline=None)
@given(from_decode, from_prefill)
def test_reflected_messages_are_rejected(request: m.FromDecode, answer: m.FromPrefill) -> None:
    with pytest.raises(AuthenticationError):
        WIRE.open_from_prefill(WIRE.seal_from_decode(request))
    with pytest.raises(AuthenticationError):
        WIRE.open_from_decode(WIRE.seal_from_prefill(answer))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_fails_authentication(frame: bytes) -> None:
    for read in (WIRE.open_from_decode, WIRE.open_from_prefill):
        with pytest.raises(AuthenticationError):
            read(frame)


@settings(deadline=None)
@given(from_decode, st.data())
def test_any_flipped_bit_fails_authentication(message: m.FromDecode, data: st.DataObject) -> None:
    frame = bytearray(WIRE.seal_from_decode(message))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AuthenticationError):
        WIRE.open_from_decode(frame)


def test_wrong_secret_fails_authentication() -> None:
    other = Wire(Envelope(bytes(32)), BLOCK)
    with pytest.raises(AuthenticationError):
        other.open_from_decode(WIRE.seal_from_decode(OPEN))


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(st.none() | st.integers(-5, 2**40) | st.text(max_size=5), st.lists, max_leaves=8).map(
            msgspec.msgpack.encode
        ),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["open", "accept", "piece", "commit", "credit", "abort", "odd"])},
            optional={
                "lease": st.just(LEASE) | st.text(max_size=40) | st.integers(-5, 5),
                "index": st.integers(-(2**40), 2**40) | st.none(),
                "digest": digests | st.binary(max_size=20),
                "taken": st.integers(-(2**40), 2**40),
                "tokens": st.binary(max_size=20) | st.integers(-(2**40), 2**40),
                "job": st.dictionaries(st.sampled_from(JOB.__struct_fields__), st.binary(max_size=5) | numbers),
                "reason": st.text(max_size=5) | st.just("x" * 5000),
            },
        ).map(msgspec.msgpack.encode),
    )
)
def test_sealed_garbage_is_invalid_or_within_limits(body: bytes) -> None:
    for key, read in ((b"fd_core/decode", WIRE.open_from_decode), (b"fd_core/prefill", WIRE.open_from_prefill)):
        frame = b"".join(Envelope(SECRET).seal(key, body))
        try:
            message = read(frame)
        except InvalidMessage as invalid:
            assert invalid.lease in (None, LEASE) or len(invalid.lease) == 32
        else:
            assert len(message.lease) == 32


def test_deeply_nested_body_is_invalid() -> None:
    frame = b"".join(Envelope(SECRET).seal(b"fd_core/decode", b"\x91" * 50_000 + b"\xc0"))
    with pytest.raises(InvalidMessage):
        WIRE.open_from_decode(frame)


BEYOND = {
    "lease": {"lease": LEASE.upper()},
    "short lease": {"lease": LEASE[:-1]},
    "no tokens": {"tokens": b""},
    "half a token": {"tokens": b"123456"},
    "negative token": {"tokens": np.array([1, -1, 2], "<i4").tobytes()},
    "too many tokens": {"tokens": bytes(4004)},
    "no window": {"window": 0},
    "huge window": {"window": MAX_WINDOW + 1},
    "negative number of held blocks": {"held_blocks": -1},
    "no blocks wanted": {"held_blocks": 3},
    "no silence": {"idle_timeout": float("nan")},
    "address": {"address": bytes(4097)},
    "connector": {"connector": "x" * 65},
    "salt": {"cache_salt": "x" * 1025},
    "tenant": {"tenant": "x" * 1025},
    "priority": {"priority": 2**40},
    "block size": {"compatibility": msgspec.structs.replace(COMPATIBILITY, block_size=0)},
    "model": {"compatibility": msgspec.structs.replace(COMPATIBILITY, model="x" * 1025)},
}


@pytest.mark.parametrize("change", BEYOND.values(), ids=BEYOND)
def test_messages_beyond_limits_are_not_sent_or_received(change: dict[str, object]) -> None:
    of_job = {name: value for name, value in change.items() if name in JOB.__struct_fields__}
    others = {name: value for name, value in change.items() if name not in of_job}
    message = msgspec.structs.replace(OPEN, job=msgspec.structs.replace(JOB, **of_job), **others)
    frame = b"".join(Envelope(SECRET).seal(b"fd_core/decode", msgspec.msgpack.encode(message)))
    with pytest.raises(InvalidMessage) as received:
        WIRE.open_from_decode(frame)
    with pytest.raises(InvalidMessage):
        WIRE.check(message)
    assert received.value.lease == (None if "lease" in change else LEASE)


def test_long_reason_is_truncated() -> None:
    received = WIRE.open_from_prefill(WIRE.seal_from_prefill(m.Refuse(LEASE, "x" * 5000)))
    assert isinstance(received, m.Refuse)
    assert received.reason == "x" * 1024


def test_piece_round_trips_with_matching_digest() -> None:
    digest, parts = WIRE.seal_piece(LEASE, 7, kv("s", 7))
    value = b"".join(parts)
    assert len(value) == WIRE.value_bytes
    opened, array = WIRE.open_piece(LEASE, 7, value)
    assert opened == digest
    assert (array == kv("s", 7)).all()
    assert not array.flags.writeable


def test_piece_is_copied_only_if_unaligned() -> None:
    _, parts = WIRE.seal_piece(LEASE, 7, kv("s", 7))
    whole = b"x" + b"".join(parts)
    _, array = WIRE.open_piece(LEASE, 7, memoryview(whole)[1:])
    assert array.flags.aligned
    assert (array == kv("s", 7)).all()


@settings(deadline=None)
@given(st.data())
def test_changed_or_moved_piece_is_damaged(data: st.DataObject) -> None:
    _, parts = WIRE.seal_piece(LEASE, 7, kv("s", 7))
    value = bytearray(b"".join(parts))
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    for lease, index in ((LEASE, 6), (LEASE[::-1], 7)):
        with pytest.raises(Damaged):
            WIRE.open_piece(lease, index, value)
    value[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        WIRE.open_piece(LEASE, 7, value)


def test_compressing_envelope_is_rejected() -> None:
    with pytest.raises(ValueError, match="compress"):
        Wire(Envelope(SECRET, "zlib"), BLOCK)


def test_frame_limit_fits_every_message() -> None:
    longest = Wire(Envelope(SECRET), BLOCK, max_tokens=2**21, images=True)
    wide, trace = "\U0001f600" * 1024, f"00-{'f' * 32}-{'f' * 16}-01"
    job = PrefillJob(bytes(4 * 2**21), 0, wide, 0, wide, traceparent=trace, lease=LEASE)
    count = MAX_JOB_PIXELS // 2352  # the smallest images of Qwen2-VL
    job = msgspec.structs.replace(job, images=(Image(2**20, 1, bytes(16), (28, 28), bytes(2352), (2, 2)),) * count)
    opening = msgspec.structs.replace(OPEN, job=job, address=bytes(4096), request_id="x" * 128)
    assert len(longest.seal_from_decode(opening)) <= longest.max_request_frame
    assert len(WIRE.seal_from_prefill(m.Refuse(LEASE, "\U0001f600" * 1024))) <= WIRE.max_frame
    assert WIRE.max_frame >= WIRE.value_bytes
