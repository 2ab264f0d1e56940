"""Messages and pieces as bytes: sealed, so that whoever lacks the secret can neither make, change nor move one.

A message is one frame, an envelope under a key that says which side speaks. A piece is an envelope of its own, under
its lease and index; the connector decides how it travels. Nothing about a frame is believed before its envelope was
opened, and nothing about a message before its limits were checked. Frames are not encrypted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy.typing as npt

from fd_core.disagg.connectors.contract import MAX_ADDRESS_BYTES, MAX_REFERENCE_BYTES
from fd_core.disagg.lease import TOKEN_BYTES
from fd_core.disagg.messages import (
    Abort,
    Accept,
    Alive,
    Commit,
    Confirm,
    Credit,
    FromDecode,
    FromPrefill,
    Open,
    Piece,
    Refuse,
)
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import Bytes
from fd_core.kv.stores.envelope import HEADER_BYTES, Damaged, Envelope

__all__ = ["MAX_WINDOW", "Unfit", "Unsealed", "Wire"]

_DECODE: Final = b"fd_core/decode"
_PREFILL: Final = b"fd_core/prefill"
_DIGEST_BYTES: Final = 16
_LEASE_BYTES: Final = 16

MAX_WINDOW: Final = 256
_MAX_NAME: Final = 64
_MAX_TEXT: Final = 1024
"""Characters of a reason, a salt, a tenant or a field of the terms."""
_MAX_NUMBER: Final = 2**31 - 1
_OVERHEAD: Final = 64 * 1024
"""More than everything in a message but the tokens, at its limits."""
_ROOM_FOR_TOKENS: Final = 4 * 2**20
"""Bytes: a prompt that is too long is refused in words; only one that is absurd costs its sender the connection."""

_Message = TypeVar("_Message", FromDecode, FromPrefill)


class Unsealed(Exception):
    """A frame was not sealed with the common secret, or is not from the side that it should be from."""


class Unfit(Exception):
    """A sealed message is not one, or is beyond a limit; `lease` is its lease, if it has one that can be answered."""

    def __init__(self, reason: str, lease: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lease = lease


class Wire:
    """Seals and opens messages and pieces. Safe to use from several threads at once but for one pair of sides."""

    def __init__(self, envelope: Envelope, block: BlockFormat, *, max_tokens: int = _MAX_NUMBER) -> None:
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
        """Return the frame of a message of the decode side. Raises `Unfit` if it is beyond a limit."""
        return self._seal(_DECODE, message)

    def seal_from_prefill(self, message: FromPrefill) -> bytes:
        """Return the frame of a message of the prefill side. Raises `Unfit` if it is beyond a limit."""
        return self._seal(_PREFILL, message)

    def open_from_decode(self, frame: Bytes) -> FromDecode:
        """Return the decode side's message in a frame. Raises `Unsealed` or `Unfit`."""
        return self._open(_DECODE, frame, self._from_decode)

    def open_from_prefill(self, frame: Bytes) -> FromPrefill:
        """Return the prefill side's message in a frame. Raises `Unsealed` or `Unfit`."""
        return self._open(_PREFILL, frame, self._from_prefill)

    def _seal(self, key: bytes, message: FromDecode | FromPrefill) -> bytes:
        if isinstance(message, Refuse | Abort) and len(message.reason) > _MAX_TEXT:
            message = msgspec.structs.replace(message, reason=message.reason[:_MAX_TEXT])
        self._check(message)
        return b"".join(self._envelope.seal(key, self._encoder.encode(message)))

    def _open(self, key: bytes, frame: Bytes, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
        try:
            body = self._envelope.open(key, frame, len(frame) - HEADER_BYTES)
        except Damaged as damaged:
            raise Unsealed(damaged.reason) from damaged
        try:
            message = decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Unfit("it is no message") from error
        self._check(message)
        return message

    def _check(self, message: FromDecode | FromPrefill) -> None:
        lease = message.lease
        if len(lease) != 2 * _LEASE_BYTES or not set(lease) <= set("0123456789abcdef"):
            raise Unfit("a lease has to be named by 32 hexadecimal digits")
        flaw: str | None = None
        match message:
            case Open():
                flaw = self._flaw_of_open(message)
            case Piece(index=index, digest=digest, reference=reference):
                if (
                    not 0 <= index <= _MAX_NUMBER
                    or len(digest) != _DIGEST_BYTES
                    or len(reference) > MAX_REFERENCE_BYTES
                ):
                    flaw = "a piece has an impossible index, digest or reference"
            case Commit(tokens=tokens, digest=digest, cached=cached):
                if not 0 < tokens <= _MAX_NUMBER or not 0 <= cached <= _MAX_NUMBER or len(digest) != _DIGEST_BYTES:
                    flaw = "a commit has an impossible number or digest"
            case Credit(taken=taken):
                flaw = None if 0 <= taken <= _MAX_NUMBER else "a credit has an impossible number"
            case Refuse(reason=reason) | Abort(reason=reason):
                flaw = "a reason is too long" if len(reason) > _MAX_TEXT else None
            case Accept() | Alive() | Confirm():
                pass
        if flaw is not None:
            raise Unfit(flaw, lease)

    def _flaw_of_open(self, opening: Open) -> str | None:
        job, terms = opening.job, opening.terms
        texts = (job.cache_salt, job.tenant, terms.model, terms.dtype)
        numbers = (
            *(terms.version, terms.block_size, terms.num_layers, terms.num_kv_heads, terms.head_dim),
            *(terms.tensor_parallel_size, terms.pipeline_parallel_size),
        )
        if len(job.tokens) % TOKEN_BYTES or not job.tokens:
            return "no KV is asked for"
        if job.num_tokens > self._max_tokens:
            return f"the prompt has {job.num_tokens} tokens, the prefill worker takes at most {self._max_tokens}"
        if job.token_ids.min() < 0:
            return "a token is negative"
        if not 1 <= opening.window <= MAX_WINDOW:
            return f"the window has to be 1 to {MAX_WINDOW} pieces"
        if not 1 <= len(opening.connector) <= _MAX_NAME or len(opening.address) > MAX_ADDRESS_BYTES:
            return "the connector's name or address is too long"
        if max(map(len, texts)) > _MAX_TEXT:
            return f"salt and tenant may have at most {_MAX_TEXT} characters"
        if not all(0 < number <= _MAX_NUMBER for number in numbers):
            return "the terms hold an impossible number"
        if not 0 <= job.held_blocks <= _MAX_NUMBER or abs(job.priority) > _MAX_NUMBER:
            return "the first block or the priority is an impossible number"
        return None

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
