"""Sealed wire format of messages and pieces: without the secret they cannot be forged, altered or moved.

A message is one frame, an envelope under a key that names the sending side. A piece is a separate envelope, under its
lease and index; the connector transports it. No frame is decoded before its envelope was opened, and no message is used
before its limits were checked. Frames are not encrypted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy.typing as npt

from fd_core.disagg.lease import LEASE_NAME, TOKEN_BYTES, validate_open
from fd_core.disagg.messages import MAX_NUMBER, MAX_TEXT, AbortLease, FromDecode, FromPrefill, Open, Refuse
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import Bytes
from fd_core.kv.stores.envelope import HEADER_BYTES, Damaged, Envelope
from fd_core.types import MAX_JOB_PIXELS

_DECODE: Final = b"fd_core/decode"
_PREFILL: Final = b"fd_core/prefill"
_DIGEST_BYTES: Final = 16
_OVERHEAD: Final = 64 * 1024
"""Bytes, more than a message without its tokens can have within the limits."""
_MAX_TOKEN_BYTES: Final = 4 * 2**20
"""Bytes: a prompt that is too long is rejected with a reason; only a frame over this limit closes the connection."""
_IMAGES_OVERHEAD: Final = 4 * 2**20
"""Bytes, more than images of `MAX_JOB_PIXELS` have besides their pixels."""

_Message = TypeVar("_Message", FromDecode, FromPrefill)
_Rejection = TypeVar("_Rejection", bound=Refuse | AbortLease)


class AuthenticationError(Exception):
    """A frame was not sealed with the common secret, or is from the wrong side."""


class InvalidMessage(Exception):
    """A frame is not a message, or a message over a limit. `lease` is that of an `Open`, which is rejected with a
    reply."""

    def __init__(self, reason: str, lease: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lease = lease


class Wire:
    """Seals and opens messages and pieces. Thread-safe."""

    def __init__(
        self, envelope: Envelope, block: BlockFormat, *, max_tokens: int = MAX_NUMBER, images: bool = False
    ) -> None:
        """`envelope` must not compress; `block` is the format of a piece; `max_tokens` limits the prompt of an
        `Open`, which may have `images`."""
        if envelope.compression != "none":
            raise ValueError("transfers are sealed with an envelope that does not compress")
        self._envelope = envelope
        self._block = block
        self._max_tokens = max_tokens
        self._encoder = msgspec.msgpack.Encoder()
        self._from_decode: msgspec.msgpack.Decoder[FromDecode] = msgspec.msgpack.Decoder(FromDecode)
        self._from_prefill: msgspec.msgpack.Decoder[FromPrefill] = msgspec.msgpack.Decoder(FromPrefill)
        self.payload_bytes = block.bytes
        """KV bytes of a piece."""
        self.value_bytes = block.bytes + HEADER_BYTES
        """Length of a sealed piece."""
        self.max_frame = self.value_bytes + _OVERHEAD
        """Limit of one frame that the decode side receives, in bytes."""
        self.max_request_frame = max(_MAX_TOKEN_BYTES, TOKEN_BYTES * min(max_tokens, 2**28)) + _OVERHEAD
        if images:
            self.max_request_frame += MAX_JOB_PIXELS + _IMAGES_OVERHEAD
        """Limit of one frame that the prefill side receives, in bytes."""

    def seal_from_decode(self, message: FromDecode) -> bytes:
        """Return the frame of a message of the decode side; that of an `Open` is within the limits, see `check`."""
        if isinstance(message, AbortLease):
            message = _shortened(message)
        return b"".join(self._envelope.seal(_DECODE, self._encoder.encode(message)))

    def seal_from_prefill(self, message: FromPrefill) -> bytes:
        """Return the frame of a message of the prefill side."""
        if isinstance(message, Refuse | AbortLease):
            message = _shortened(message)
        return b"".join(self._envelope.seal(_PREFILL, self._encoder.encode(message)))

    def open_from_decode(self, frame: Bytes) -> FromDecode:
        """Return the decode side's message in a frame. Raises `AuthenticationError` or `InvalidMessage`."""
        message = self._open(_DECODE, frame, self._from_decode)
        if isinstance(message, Open):
            self.check(message)
        return message

    def open_from_prefill(self, frame: Bytes) -> FromPrefill:
        """Return the prefill side's message in a frame. Raises `AuthenticationError` or `InvalidMessage`."""
        return self._open(_PREFILL, frame, self._from_prefill)

    def check(self, opening: Open) -> None:
        """Raise `InvalidMessage` for an `Open` over a limit."""
        if (wrong := validate_open(opening, self._max_tokens)) is not None:
            raise InvalidMessage(wrong, opening.lease if LEASE_NAME.fullmatch(opening.lease) else None)

    def _open(self, key: bytes, frame: Bytes, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
        try:
            body = self._envelope.open(key, frame, len(frame) - HEADER_BYTES)
        except Damaged as damaged:
            raise AuthenticationError(damaged.reason) from damaged
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidMessage("it is malformed or exceeds a limit") from error

    def seal_piece(self, lease: str, index: int, array: npt.NDArray[Any]) -> tuple[bytes, Sequence[Bytes]]:
        """Return digest and parts of the piece of a block's array, without copying the array."""
        header, payload = self._envelope.seal(bytes.fromhex(lease) + index.to_bytes(4, "little"), array.data.cast("B"))
        return bytes(memoryview(header)[-_DIGEST_BYTES:]), (header, payload)

    def open_piece(self, lease: str, index: int, value: Bytes) -> tuple[bytes, npt.NDArray[Any]]:
        """Return digest and array of a piece, usually a view into `value`. Raises `Damaged`."""
        key = bytes.fromhex(lease) + index.to_bytes(4, "little")
        payload = self._envelope.open(key, value, self._block.bytes)
        digest = bytes(memoryview(value).cast("B")[HEADER_BYTES - _DIGEST_BYTES : HEADER_BYTES])
        return digest, self._block.view(payload)


def _shortened(message: _Rejection) -> _Rejection:
    too_long = len(message.reason) > MAX_TEXT
    return msgspec.structs.replace(message, reason=message.reason[:MAX_TEXT]) if too_long else message
