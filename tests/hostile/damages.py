"""All kinds of damage to a sealed value, each with the reason that the envelope has to report."""

from __future__ import annotations

import struct
import zlib

from fd_core.kv.stores.envelope import HEADER_BYTES, Damage, Envelope

__all__ = ["damages"]

_FIELDS = struct.Struct("<4sBBBxII32s12s4x")
_FIELD_ENDS = (
    *((4, Damage.FOREIGN), (5, Damage.VERSION), (6, Damage.DIGEST), (7, Damage.KEY), (8, Damage.DIGEST)),
    *((16, Damage.LENGTH), (48, Damage.KEY), (80, Damage.DIGEST)),
)
"""End of each header field, and the reason reported for a change in it."""


def damages(envelope: Envelope, value: bytes, other: bytes, step: int = 1) -> dict[str, tuple[bytes, Damage | None]]:
    """Return damaged forms of `value` by name, each with its reason; None for those longer than the original value.

    `other` is an intact value of the same envelope under another key; every `step`th byte is changed.
    """
    header, payload = value[:HEADER_BYTES], value[HEADER_BYTES:]
    found: dict[str, tuple[bytes, Damage | None]] = {}
    for at in range(0, HEADER_BYTES, step):
        reason = next(reason for end, reason in _FIELD_ENDS if at < end)
        found[f"bit of byte {at}"] = _xored(value, at, 1), reason
        # 255 is not a compression type.
        found[f"byte {at}"] = _xored(value, at, 255), Damage.COMPRESSION if at == 5 else reason
    for at in range(HEADER_BYTES, len(value), step):
        found[f"bit of byte {at}"] = _xored(value, at, 1), Damage.DIGEST
    for length in sorted({*range(0, len(value), step), 79, 80, 81, len(value) - 1}):
        found[f"cut to {length}"] = value[:length], Damage.SHORT if length < HEADER_BYTES else Damage.LENGTH
    for more in (1, 16, 4096):
        found[f"longer by {more}"] = value + bytes(more), None
    found |= {
        "zeros": (bytes(len(value)), Damage.FOREIGN),
        "ones": (b"\xff" * len(value), Damage.FOREIGN),
        "another store's JSON": (b'{"kv": [1, 2, 3]}'.ljust(len(value)), Damage.FOREIGN),
        "no header": (payload.ljust(len(value), b"\x01"), Damage.FOREIGN),
        "payload of zeros": (header + bytes(len(payload)), Damage.DIGEST),
        "header of another": (other[:HEADER_BYTES] + payload, Damage.KEY),
        "payload of another": (header + other[HEADER_BYTES:], Damage.DIGEST),
        "digest of another": (value[:64] + other[64:HEADER_BYTES] + payload, Damage.DIGEST),
        "another": (other, Damage.KEY),
    }
    return found | _sealed_by_us(envelope, value) | _sealed_by_strangers(envelope, value)


def _sealed_by_us(envelope: Envelope, value: bytes) -> dict[str, tuple[bytes, Damage | None]]:
    """Values with a valid digest that are otherwise wrong: another version, model or layout, or a bug in the writer."""
    magic, version, compression, key_length, raw, stored, key, nonce = _FIELDS.unpack(value[: _FIELDS.size])
    payload = value[HEADER_BYTES:]

    def sealed(content: bytes, *fields: object) -> bytes:
        packed = _FIELDS.pack(*fields)
        return packed + envelope._digest(packed, memoryview(content), nonce) + content

    half, packed = payload[: len(payload) // 2], zlib.compress(payload[: len(payload) // 2])
    same = (key_length, raw, stored, key, nonce)
    return {
        "sealed magic": (sealed(payload, b"FDKW", version, compression, *same), Damage.FOREIGN),
        "sealed version": (sealed(payload, magic, version + 1, compression, *same), Damage.VERSION),
        "sealed version 0": (sealed(payload, magic, 0, compression, *same), Damage.VERSION),
        "sealed compression": (sealed(payload, magic, version, 2, *same), Damage.COMPRESSION),
        "sealed as compressed": (sealed(payload, magic, version, 1, *same), Damage.COMPRESSION),
        "sealed compressed half": (
            sealed(packed, magic, version, 1, key_length, raw, len(packed), key, nonce),
            Damage.COMPRESSION,
        ),
        "sealed bomb": (_bomb(sealed, value), Damage.COMPRESSION),
        "sealed key length": (sealed(payload, magic, version, compression, 1, raw, stored, key, nonce), Damage.KEY),
        "sealed key of another model": (
            sealed(payload, magic, version, compression, key_length, raw, stored, _xored(key, 0, 7), nonce),
            Damage.KEY,
        ),
        "sealed in half the width": (
            sealed(half, magic, version, compression, key_length, len(half), len(half), key, nonce),
            Damage.LENGTH,
        ),
        "sealed raw length": (
            sealed(payload, magic, version, compression, key_length, raw + 1, stored, key, nonce),
            Damage.LENGTH,
        ),
        "sealed stored length": (
            sealed(payload, magic, version, compression, key_length, raw, stored - 1, key, nonce),
            Damage.LENGTH,
        ),
        "sealed without content": (
            sealed(b"", magic, version, compression, key_length, raw, 0, key, nonce),
            Damage.LENGTH,
        ),
        "sealed in twice the width": (
            sealed(payload * 2, magic, version, compression, key_length, 2 * raw, 2 * stored, key, nonce),
            None,
        ),
    }


def _bomb(sealed, value: bytes) -> bytes:  # type: ignore[no-untyped-def]
    """A few bytes that claim to unpack to one block but would unpack to megabytes."""
    magic, version, _, key_length, raw, _, key, nonce = _FIELDS.unpack(value[: _FIELDS.size])
    packer = zlib.compressobj(9)
    content = packer.compress(bytes(100 << 10)) + packer.flush(zlib.Z_SYNC_FLUSH)
    content = content[: len(value) - HEADER_BYTES]
    result: bytes = sealed(content, magic, version, 1, key_length, raw, len(content), key, nonce)
    return result


def _sealed_by_strangers(envelope: Envelope, value: bytes) -> dict[str, tuple[bytes, Damage | None]]:
    fields = _FIELDS.unpack(value[: _FIELDS.size])
    key = fields[6][: fields[3]]
    stranger = Envelope(b"another secret".ljust(32))
    return {
        "sealed with another secret": (b"".join(stranger.seal(key, value[HEADER_BYTES:])), Damage.DIGEST),
        "sealed with another nonce": (
            b"".join(envelope.seal(key, value[HEADER_BYTES:]))[:HEADER_BYTES][:64] + value[64:],
            Damage.DIGEST,
        ),
    }


def _xored(value: bytes, at: int, mask: int) -> bytes:
    return value[:at] + bytes([value[at] ^ mask]) + value[at + 1 :]
