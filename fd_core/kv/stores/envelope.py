"""Envelope of stored values: proves that a value is complete, has the right key, and was sealed with our secret.

A stored value is a header of 80 bytes and the payload after it. Stores are best effort and others may write to them:
no field is used before the digest was verified, and no part of a damaged value is used.
"""

from __future__ import annotations

import enum
import hmac
import os
import struct
import zlib
from collections.abc import Callable
from typing import Final, Literal

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fd_core.kv.stores.contract import MAX_KEY_BYTES, Bytes

Compression = Literal["none", "zlib"]
COMPRESSIONS: Final[tuple[Compression, ...]] = ("none", "zlib")
"""Ways to compress a payload; the index of each is its code in the header."""

_MAGIC: Final = b"FDKV"
_FORMAT_VERSION: Final = 1
_FIELDS: Final = struct.Struct("<4sBBBxII32s12s4x")
"""Magic, format version, compression, key length, zero, raw and payload length in bytes, key padded with zeros, nonce,
zeros."""
_NONCE_BYTES: Final = 12
_SECRET_BYTES: Final = 32
_DIGEST_BYTES: Final = 16
_ZLIB_LEVEL: Final = 1

HEADER_BYTES: Final = _FIELDS.size + _DIGEST_BYTES
"""80 bytes, so that a payload is aligned to 16 bytes where its value is."""
_MAX_PAYLOAD_BYTES: Final = 2**32 - 1


class Damage(enum.StrEnum):
    """Kind of damage of a stored value; the label of the damage metric."""

    SHORT = "short"
    """Shorter than a header."""
    FOREIGN = "foreign"
    """Not sealed by an envelope: wrong magic number."""
    VERSION = "version"
    """Written in another format version."""
    COMPRESSION = "compression"
    """Unknown compression, or not the one in the header."""
    LENGTH = "length"
    """Truncated, with trailing bytes, or not of the expected length."""
    KEY = "key"
    """Sealed for another key."""
    DIGEST = "digest"
    """Altered, or written with another secret."""


class Damaged(Exception):
    """A stored value is damaged. Holds the kind of damage and no part of the value."""

    def __init__(self, reason: Damage) -> None:
        super().__init__(f"a stored value is damaged: {reason}")
        self.reason = reason


class Envelope:
    """Seals payloads and opens stored values. Safe to use from several threads at once.

    The digest is AES-256-GMAC (NIST SP 800-38D) with a random nonce for each value, over the header's fields, which
    include key and nonce, and the payload as stored. Without the secret a value can be neither forged nor moved to
    another key. It is the fastest keyed digest on CPUs with AES instructions.
    """

    def __init__(
        self, secret: bytes, compression: Compression = "none", draw: Callable[[int], bytes] = os.urandom
    ) -> None:
        """`secret`: 32 bytes, see `fd_core.kv.stores.secret.derive`; `compression` applies to values sealed from now
        on.

        `draw` returns so many bytes, never the same twice: predictable or repeated bytes allow forgery.
        """
        if len(secret) != _SECRET_BYTES:
            raise ValueError(f"expected a secret of {_SECRET_BYTES} bytes, got {len(secret)}")
        self._secret = algorithms.AES(secret)
        self.compression = compression
        self._draw = draw

    def seal(self, key: bytes, payload: Bytes) -> tuple[Bytes, Bytes]:
        """Return header and payload, to be stored one after the other under `key` of at most 32 bytes.

        The payload is the buffer passed in, unless compression made it smaller. The total is at most `HEADER_BYTES`
        plus the length of the payload.
        """
        raw = memoryview(payload).cast("B")
        if not 1 <= len(key) <= MAX_KEY_BYTES or len(raw) > _MAX_PAYLOAD_BYTES:
            raise ValueError(f"a key of {len(key)} bytes or a payload of {len(raw)} bytes does not fit an envelope")
        stored, compression = raw, "none"
        if self.compression == "zlib":
            packed = zlib.compress(raw, _ZLIB_LEVEL)
            if len(packed) < len(raw):
                stored, compression = memoryview(packed), "zlib"
        nonce = self._draw(_NONCE_BYTES)
        fields = _FIELDS.pack(
            _MAGIC, _FORMAT_VERSION, COMPRESSIONS.index(compression), len(key), len(raw), len(stored), key, nonce
        )
        return fields + self._digest(fields, stored, nonce), stored

    def open(self, key: bytes, value: Bytes, payload_bytes: int) -> memoryview:
        """Return the payload that was sealed under `key`, uint8[payload_bytes], usually a view into `value`.

        `payload_bytes` is the expected length; other lengths are rejected and no more memory is allocated. Raises
        `Damaged` on any mismatch.
        """
        whole = memoryview(value).cast("B")
        if len(whole) < HEADER_BYTES:
            raise Damaged(Damage.SHORT)
        fields, digest, stored = whole[: _FIELDS.size], whole[_FIELDS.size : HEADER_BYTES], whole[HEADER_BYTES:]
        magic, version, compression, key_length, raw_length, stored_length, padded_key, nonce = _FIELDS.unpack(fields)
        if magic != _MAGIC:
            raise Damaged(Damage.FOREIGN)
        if version != _FORMAT_VERSION:
            raise Damaged(Damage.VERSION)
        if compression >= len(COMPRESSIONS):
            raise Damaged(Damage.COMPRESSION)
        if raw_length != payload_bytes or stored_length != len(stored):
            raise Damaged(Damage.LENGTH)
        if (key_length, padded_key) != (len(key), key.ljust(MAX_KEY_BYTES, b"\0")):
            raise Damaged(Damage.KEY)
        if not hmac.compare_digest(self._digest(fields, stored, nonce), digest):
            raise Damaged(Damage.DIGEST)
        if COMPRESSIONS[compression] == "none":
            if len(stored) != payload_bytes:
                raise Damaged(Damage.LENGTH)
            return stored
        unpacker = zlib.decompressobj()
        try:
            # One byte more than expected detects an overlong payload without decompressing all of it.
            raw = unpacker.decompress(stored, payload_bytes + 1)
        except zlib.error as error:
            raise Damaged(Damage.COMPRESSION) from error
        if len(raw) != payload_bytes or not unpacker.eof or unpacker.unused_data:
            raise Damaged(Damage.COMPRESSION)
        return memoryview(raw)

    def _digest(self, fields: Bytes, stored: memoryview, nonce: bytes) -> bytes:
        # GMAC is GCM with all input as additional authenticated data.
        mac = Cipher(self._secret, modes.GCM(nonce)).encryptor()
        mac.authenticate_additional_data(fields)
        mac.authenticate_additional_data(stored)
        mac.finalize()
        return mac.tag
