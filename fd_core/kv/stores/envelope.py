"""The envelope of every stored value: it proves that a value is whole, under its own key, and sealed with our secret.

A stored value is a header of 80 bytes and the payload after it. Stores are best effort and others may write to them:
nothing about a value is believed before its digest was checked, and no part of a damaged value is used.
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
    """Not sealed by an envelope: the magic number is another."""
    VERSION = "version"
    """Written by a version with another format."""
    COMPRESSION = "compression"
    """Compressed in an unknown way, or not in the way that the header names."""
    LENGTH = "length"
    """Truncated, with trailing bytes, or not of the length that the caller expects."""
    KEY = "key"
    """Sealed for another key."""
    DIGEST = "digest"
    """Altered, or written with another secret."""


class Damaged(Exception):
    """A stored value must not be used. Holds the kind of damage and nothing of the value."""

    def __init__(self, reason: Damage) -> None:
        super().__init__(f"a stored value is damaged: {reason}")
        self.reason = reason


class Envelope:
    """Seals payloads and opens stored values. Safe to use from several threads at once.

    The digest is AES-256-GMAC (NIST SP 800-38D) with a random nonce for each value, over the header's fields, which
    include key and nonce, and the payload as stored. Whoever lacks the secret cannot make a value that opens, nor move
    one to another key. It is the fastest keyed digest where processors have instructions for AES.
    """

    def __init__(
        self, secret: bytes, compression: Compression = "none", draw: Callable[[int], bytes] = os.urandom
    ) -> None:
        """`secret`: 32 bytes, see `fd_core.kv.stores.secret.derive`; `compression` of what is sealed from here on.

        `draw` returns so many bytes, never the same twice: predictable or repeated bytes allow forgery.
        """
        if len(secret) != _SECRET_BYTES:
            raise ValueError(f"the secret has {len(secret)} bytes instead of {_SECRET_BYTES}")
        self._secret = algorithms.AES(secret)
        self.compression = compression
        self._draw = draw

    def seal(self, key: bytes, payload: Bytes) -> tuple[Bytes, Bytes]:
        """Return header and payload, to be stored one after the other under `key` of at most 32 bytes.

        The payload is the very buffer that was given, unless compression made it smaller. The two together are never
        longer than `HEADER_BYTES` and the payload.
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

        `payload_bytes` is what the caller expects; no other length is accepted and no more memory than that is taken.
        Raises `Damaged` for anything that is wrong.
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
            # One byte more than expected shows that there is more, without producing all of it.
            raw = unpacker.decompress(stored, payload_bytes + 1)
        except zlib.error as error:
            raise Damaged(Damage.COMPRESSION) from error
        if len(raw) != payload_bytes or not unpacker.eof or unpacker.unused_data:
            raise Damaged(Damage.COMPRESSION)
        return memoryview(raw)

    def _digest(self, fields: Bytes, stored: memoryview, nonce: bytes) -> bytes:
        # GMAC is GCM that encrypts nothing and authenticates everything.
        mac = Cipher(self._secret, modes.GCM(nonce)).encryptor()
        mac.authenticate_additional_data(fields)
        mac.authenticate_additional_data(stored)
        mac.finalize()
        return mac.tag
