import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.kv.stores.envelope import HEADER_BYTES, Damage, Damaged, Envelope

SECRET = bytes(range(32))
KEY = b"sixteen bytes ok"
keys = st.binary(min_size=1, max_size=32)
payloads = st.binary(max_size=300)
compressions = st.sampled_from(["none", "zlib"])


def sealed(key=KEY, payload=b"payload" * 20, compression="none", secret=SECRET) -> bytes:
    return b"".join(Envelope(secret, compression).seal(key, payload))


def damage(value, key=KEY, payload_bytes=140, secret=SECRET) -> Damage:
    with pytest.raises(Damaged) as caught:
        Envelope(secret).open(key, value, payload_bytes)
    return caught.value.reason


@given(keys, payloads, compressions, compressions)
def test_sealed_value_opens_under_any_compression_setting(key, payload, writes, reads):
    value = sealed(key, payload, writes)
    assert Envelope(SECRET, reads).open(key, value, len(payload)) == payload
    assert len(value) <= HEADER_BYTES + len(payload)


@given(keys, payloads, compressions, st.data())
def test_any_flipped_bit_is_rejected(key, payload, compression, data):
    value = bytearray(sealed(key, payload, compression))
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    damage(value, key, len(payload))


def test_every_flipped_header_bit_is_rejected():
    for bit in range(8 * HEADER_BYTES):
        value = bytearray(sealed())
        value[bit // 8] ^= 1 << bit % 8
        damage(value)


@given(payloads, compressions, st.data())
def test_any_truncation_is_rejected(payload, compression, data):
    value = sealed(payload=payload, compression=compression)
    cut = data.draw(st.integers(0, len(value) - 1))
    expected = Damage.SHORT if cut < HEADER_BYTES else Damage.LENGTH
    assert damage(value[:cut], payload_bytes=len(payload)) == expected


@given(payloads, compressions, st.binary(min_size=1, max_size=50))
def test_any_extension_is_rejected(payload, compression, more):
    value = sealed(payload=payload, compression=compression)
    assert damage(value + more, payload_bytes=len(payload)) == Damage.LENGTH


@given(keys, keys, payloads)
def test_value_is_bound_to_its_key(key, other, payload):
    if key != other:
        assert damage(sealed(key, payload), other, len(payload)) == Damage.KEY


@given(payloads, st.binary(max_size=300))
def test_header_is_bound_to_its_payload(payload, other):
    if payload != other:
        assert damage(sealed(payload=payload)[:HEADER_BYTES] + other, payload_bytes=len(payload)) in (
            Damage.LENGTH,
            Damage.DIGEST,
        )


@given(st.binary(max_size=400), st.integers(0, 400))
def test_garbage_is_rejected(value, payload_bytes):
    damage(value, payload_bytes=payload_bytes)
    damage(b"FDKV" + value, payload_bytes=payload_bytes)


def test_value_is_bound_to_its_secret():
    assert damage(sealed(), secret=b"x" * 32) == Damage.DIGEST


def test_error_kinds_are_distinguished():
    value = sealed()
    assert damage(b"") == Damage.SHORT
    assert damage(b"X" + value[1:]) == Damage.FOREIGN
    assert damage(value[:4] + b"\x02" + value[5:]) == Damage.VERSION
    assert damage(value[:5] + b"\x07" + value[6:]) == Damage.COMPRESSION
    assert damage(value, payload_bytes=139) == Damage.LENGTH
    assert damage(value[:-1] + b"?") == Damage.DIGEST


def test_decompression_bomb_allocates_no_memory(monkeypatch):
    # Only a holder of the secret can create one: sealed here as if it were a highly compressible payload.
    bomb = zlib.compress(bytes(64 << 20))
    monkeypatch.setattr(zlib, "compress", lambda raw, level: bomb)
    value = sealed(payload=b"a" * 1_000_000, compression="zlib")
    monkeypatch.undo()
    limits = []

    class Watched:
        def __init__(self):
            self.inner = zlib._real()

        def decompress(self, data, limit):
            limits.append(limit)
            return self.inner.decompress(data, limit)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(zlib, "_real", zlib.decompressobj, raising=False)
    monkeypatch.setattr(zlib, "decompressobj", Watched)
    assert damage(value, payload_bytes=1_000_000) == Damage.COMPRESSION
    assert limits == [1_000_001]


@pytest.mark.parametrize("packed", [zlib.compress(b"short"), zlib.compress(b"a" * 140) + b"rest", b"not zlib", b""])
def test_inconsistent_compressed_payload_is_rejected(monkeypatch, packed):
    monkeypatch.setattr(zlib, "compress", lambda raw, level: packed)
    value = sealed(payload=b"a" * 140, compression="zlib")
    monkeypatch.undo()
    assert damage(value) == Damage.COMPRESSION


def test_sealing_and_opening_do_not_copy():
    payload = np.arange(1000, dtype=np.float32)
    header, stored = Envelope(SECRET).seal(KEY, memoryview(payload))
    assert np.shares_memory(np.frombuffer(stored, np.uint8), payload)
    value = np.frombuffer(header + bytes(stored), np.uint8)
    opened = Envelope(SECRET).open(KEY, memoryview(value), payload.nbytes)
    assert np.shares_memory(np.frombuffer(opened, np.uint8), value)
    assert opened == payload.tobytes()


def test_incompressible_value_is_stored_uncompressed():
    payload = zlib.compress(np.random.default_rng(0).bytes(2000))
    _, stored = Envelope(SECRET, "zlib").seal(KEY, payload)
    assert stored == payload
    _, stored = Envelope(SECRET, "zlib").seal(KEY, bytes(2000))
    assert len(stored) < 100


@pytest.mark.parametrize("key", [b"", b"x" * 33])
def test_invalid_key_is_a_caller_error(key):
    with pytest.raises(ValueError, match="does not fit"):
        Envelope(SECRET).seal(key, b"")


def test_errors_contain_no_value_or_secret():
    with pytest.raises(Damaged) as caught:
        Envelope(SECRET).open(KEY, sealed()[:-1], 140)
    assert str(caught.value) == "a stored value is damaged: length"
    with pytest.raises(ValueError, match="32"):
        Envelope(b"short")
