"""HTTP/1.1 with a limit on the head of a request, on connections that are watched."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fd_core.http.connections.connections import MAX_HEAD_BYTES, Connections, WatchedProtocol

_UPGRADE: Final = re.compile(rb"^upgrade:", re.IGNORECASE | re.MULTILINE)
"""Asks for another protocol, which a server may ignore, and Java's client does; the parser would drop the body."""
_SLICE: Final = 4096
"""Bytes that are parsed at a time while a head is not complete."""
_EACH_TIME: Final = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library")
"""Warnings of the library that any client can cause, as often as it likes."""


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Tell what the library logs of itself from what clients cause, and from requests that a shutdown cancels."""
    cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and not str(record.msg).startswith(_EACH_TIME)


logging.getLogger("uvicorn.error").addFilter(_worth_a_line)


class BoundedHttp(WatchedProtocol, HttpToolsProtocol):
    """uvicorn's protocol, which answers 431 and closes when a head does not end."""

    def __init__(self, connections: Connections, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.watch = connections
        self._in_head = True
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse, and count what arrived while the head is not complete, in slices so that one read is no exception."""
        if b"pgrade:" in data and self._waits_for != "body":
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"x-upgrade:", head) + end + rest
        begin = 0
        while begin < len(data) and not self.transport.is_closing():
            part = data[begin : begin + _SLICE] if self._in_head else data[begin:]
            begin += len(part)
            super().data_received(part)
            if not self._in_head:
                continue
            self._head_bytes += len(part)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.end(self.head_too_large())

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the shape of every other error."""
        self.end(self.not_http())

    def on_message_begin(self) -> None:
        """Begin to count."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop counting: the body has a limit of its own."""
        self._in_head = False
        if not self.url.startswith(b"/"):
            self._take_host_of_target()
        self.head_complete()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Tell that the request is complete."""
        super().on_message_complete()
        self.body_complete()

    def on_response_complete(self) -> None:
        """Tell that the answer was sent."""
        super().on_response_complete()
        self.answer_complete()

    def _take_host_of_target(self) -> None:
        """A request for a whole URL means the host in it, whatever the header says (RFC 9112, section 3.2.2)."""
        try:
            host = httptools.parse_url(self.url).host
        except httptools.HttpParserInvalidURLError:
            return
        if host is not None:
            host = b"[%b]" % host if b":" in host else host
            self.headers[:] = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers.append((b"host", host))
