"""Heads of HTTP/1.1 messages: their headers from bytes and to bytes, and headers of one connection only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from multidict import CIMultiDict

Headers = CIMultiDict[str]
HOP_BY_HOP: Final = frozenset(
    """
    connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding
    upgrade
    """.split()
)
"""Headers that belong to one connection (RFC 9110, section 7.6.1)."""


def read_headers(lines: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of a parsed head, which are bytes: those that are not UTF-8 are passed on unchanged."""
    return CIMultiDict(
        [(str(name, "utf-8", "surrogateescape"), str(value, "utf-8", "surrogateescape")) for name, value in lines]
    )


def forwarded(given: Headers, dropped: frozenset[str]) -> Headers:
    """Return headers for the next connection, without those that are `dropped` (in lower case) or of this connection.

    `dropped` includes `HOP_BY_HOP`.
    """
    connection = given.get("Connection")
    if connection is not None:
        dropped = dropped | {name.strip().lower() for name in connection.split(",")}
    kept = given.copy()
    for name in given:
        if name.lower() in dropped:
            kept.popall(name, None)
    return kept


def request_head(method: str, target: str, host: str, headers: Mapping[str, str], length: int | None) -> bytes:
    """Return the head of a request to `host`; `length` is that of its body, if it has one."""
    first = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n"
    return _head(first if length is None else f"{first}Content-Length: {length}\r\n", headers)


def answer_head(status: int, headers: Mapping[str, str], framing: str) -> bytes:
    """Return the head of an answer; `framing` are the lines that state how its body ends."""
    return _head(f"{_status_line(status)}Date: {_date(int(time.time()))}\r\n{framing}", headers)


def _head(first: str, headers: Mapping[str, str]) -> bytes:
    rest = "\r\n".join([*map(": ".join, headers.items()), "\r\n"])
    if not rest.count("\n") == rest.count("\r") == len(headers) + 1:
        raise ValueError("a header contains a line break")
    return (first + rest).encode("utf-8", "surrogateescape")


@lru_cache(maxsize=64)
def _status_line(status: int) -> str:
    try:
        return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
    except ValueError:  # a worker's own
        return f"HTTP/1.1 {status} \r\n"


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
