"""Messages and pieces as bytes, sealed: whoever lacks the secret can neither make one, nor change it, nor move it.

A message is one frame, an envelope under a key that names the side that speaks. A piece is an envelope of its own,
under its lease and index; the connector decides how it travels. No frame is decoded before its envelope was opened, and
no message is used before its limits were checked. Frames are not encrypted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy.typing as npt

from fd_core.disagg.lease import LEASE_NAME, TOKEN_BYTES, flaw
from fd_core.disagg.messages import MAX_NUMBER, MAX_TEXT, AbortLease, FromDecode, FromPrefill, Open, Refuse
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import Bytes
from fd_core.kv.stores.envelope import HEADER_BYTES, Damaged, Envelope

__all__ = ["Unfit", "Unsealed", "Wire"]

_DECODE: Final = b"fd_core/decode"
_PREFILL: Final = b"fd_core/prefill"
_DIGEST_BYTES: Final = 16
_OVERHEAD: Final = 64 * 1024
"""Bytes, more than a message without its tokens can have within the limits."""
_ROOM_FOR_TOKENS: Final = 4 * 2**20
"""Bytes: a prompt that is too long is refused in words; only one that is absurd costs its sender the connection."""

_Message = TypeVar("_Message", FromDecode, FromPrefill)


class Unsealed(Exception):
    """A frame was not sealed with the common secret, or comes from the wrong side."""


class Unfit(Exception):
    """A message is none, or beyond a limit. `lease` names the lease of an `Open`, which is answered."""

    def __init__(self, reason: str, lease: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lease = lease


class Wire:
    """Seals and opens messages and pieces. Safe to use from several threads at once but for one pair of sides."""

    def __init__(self, envelope: Envelope, block: BlockFormat, *, max_tokens: int = MAX_NUMBER) -> None:
        """`envelope` must not compress; `block` is what a piece holds; `max_tokens` bounds what `Open` may ask for."""
        if envelope.compression != "none":
            raise ValueError("transfers are sealed with an envelope that does not compress")
        self._envelope = envelope
        self._block = block
        self._max_tokens = max_tokens
        self._encoder = msgspec.msgpack.Encoder()
        self._from_decode: msgspec.msgpack.Decoder[FromDecode] = msgspec.msgpack.Decoder(FromDecode)
        self._from_prefill: msgspec.msgpack.Decoder[FromPrefill] = msgspec.msgpack.Decoder(FromPrefill)
        self.payload_bytes = block.bytes
        """Bytes of KV in a piece."""
        self.value_bytes = block.bytes + HEADER_BYTES
        """Length of a sealed piece."""
        self.max_frame = self.value_bytes + _OVERHEAD
        """Bytes that the decode side takes in one frame."""
        self.max_request_frame = max(_ROOM_FOR_TOKENS, TOKEN_BYTES * min(max_tokens, 2**28)) + _OVERHEAD
        """Bytes that the prefill side takes in one frame."""

    # Messages ---------------------------------------------------------------------------------------------

    def seal_from_decode(self, message: FromDecode) -> bytes:
        """Return the frame of a message of the decode side. Raises `Unfit` for an `Open` beyond a limit."""
        self._check(message)
        return self._seal(_DECODE, message)

    def seal_from_prefill(self, message: FromPrefill) -> bytes:
        """Return the frame of a message of the prefill side."""
        return self._seal(_PREFILL, message)

    def open_from_decode(self, frame: Bytes) -> FromDecode:
        """Return the decode side's message in a frame. Raises `Unsealed` or `Unfit`."""
        message = self._open(_DECODE, frame, self._from_decode)
        self._check(message)
        return message

    def open_from_prefill(self, frame: Bytes) -> FromPrefill:
        """Return the prefill side's message in a frame. Raises `Unsealed` or `Unfit`."""
        return self._open(_PREFILL, frame, self._from_prefill)

    def _seal(self, key: bytes, message: FromDecode | FromPrefill) -> bytes:
        if isinstance(message, Refuse | AbortLease) and len(message.reason) > MAX_TEXT:
            message = msgspec.structs.replace(message, reason=message.reason[:MAX_TEXT])
        return b"".join(self._envelope.seal(key, self._encoder.encode(message)))

    def _open(self, key: bytes, frame: Bytes, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
        try:
            body = self._envelope.open(key, frame, len(frame) - HEADER_BYTES)
        except Damaged as damaged:
            raise Unsealed(damaged.reason) from damaged
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Unfit("it is no message within the limits") from error

    def _check(self, message: FromDecode) -> None:
        if isinstance(message, Open) and (wrong := flaw(message, self._max_tokens)) is not None:
            raise Unfit(wrong, message.lease if LEASE_NAME.fullmatch(message.lease) else None)

    # Pieces -----------------------------------------------------------------------------------------------

    def seal_piece(self, lease: str, index: int, array: npt.NDArray[Any]) -> tuple[bytes, Sequence[Bytes]]:
        """Return digest and parts of the piece that holds a block's array, which is not copied."""
        header, payload = self._envelope.seal(_piece_key(lease, index), array.data.cast("B"))
        return bytes(memoryview(header)[-_DIGEST_BYTES:]), (header, payload)

    def open_piece(self, lease: str, index: int, value: Bytes) -> tuple[bytes, npt.NDArray[Any]]:
        """Return digest and array of a piece, usually a view into `value`. Raises `Damaged`."""
        payload = self._envelope.open(_piece_key(lease, index), value, self._block.bytes)
        digest = bytes(memoryview(value).cast("B")[HEADER_BYTES - _DIGEST_BYTES : HEADER_BYTES])
        return digest, self._block.view(payload)


def _piece_key(lease: str, index: int) -> bytes:
    return bytes.fromhex(lease) + index.to_bytes(4, "little")
