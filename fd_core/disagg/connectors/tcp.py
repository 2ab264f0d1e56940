"""In-band transfer: values are frames after the messages that announce them, on the connection of the workers."""

from __future__ import annotations

from collections.abc import Sequence

from fd_core.disagg.connectors import contract


class TCPConnector(contract.Connector):
    """Connector for any network connection: one copy, when the decode side joins the frames of a value."""

    name = "tcp"

    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> contract.KVInbox:
        """Return an inbox without memory: values stay in the frames of messages."""
        return _TCPEnd(value_bytes)

    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> contract.KVOutbox:
        """Return an outbox that returns the parts of values as frames."""
        if address:
            raise contract.ConnectorError("the connector tcp has no addresses, but the decode worker sent one")
        return _TCPEnd(value_bytes)


class _TCPEnd(contract.KVInbox, contract.KVOutbox):
    """Either end of a lease; stateless."""

    address = b""

    def __init__(self, value_bytes: int) -> None:
        self._value_bytes = value_bytes
        self._closed = False

    def take(self, index: int, reference: bytes, frames: Sequence[contract.Bytes]) -> contract.Bytes:
        if self._closed:
            raise contract.ConnectorError("the lease is over")
        if reference or not frames:
            raise contract.ConnectorError("a piece's message has no frame with its value")
        flat, _ = contract.flat_parts(frames, self._value_bytes)
        return flat[0] if len(flat) == 1 else b"".join(flat)

    def put(self, index: int, parts: Sequence[contract.Bytes]) -> contract.PutResult:
        if self._closed:
            raise contract.ConnectorError("the lease is over")
        flat, _ = contract.flat_parts(parts, self._value_bytes)
        return contract.PutResult(b"", tuple(flat) or (b"",))

    def close(self) -> None:
        self._closed = True
