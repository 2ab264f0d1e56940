"""Request heads at the size limit: rejected beyond it however they arrive, and parsed quickly below."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

import fd_core
from fd_core.http.connections.connections import MAX_HEAD_BYTES
from fd_core.http.headers import length_of
from tests.hostile.endpoints import COMPLETIONS, KINDS, Endpoint, endpoint
from tests.hostile.event_loop import LONGEST_STALL, Beats, least
from tests.hostile.limits import LONG

both = pytest.mark.parametrize("kind", KINDS)
ROOM = MAX_HEAD_BYTES - 1024
_PARSED = ("content-type", "origin")
"""Parsed headers, so the default run also tries every value with them."""


def header_names() -> list[str]:
    """Return every header named in the sources of servers and routers, and those that libraries read."""
    found = {"connection", "cookie", "expect", "forwarded", "keep-alive", "te", "traceparent", "x-forwarded-for"}
    for folder in ("http", "server", "router", "disagg", "engine/tracing"):
        for path in Path(fd_core.__file__).parent.joinpath(folder).rglob("*.py"):
            found |= {
                name.lower()
                for name in re.findall(r'"((?:[A-Z][\w]*-)+[A-Z]\w*|[a-z]+(?:-[a-z]+)+)"', path.read_text())
            }
    return sorted(found | {"accept", "authorization", "host", "origin"} - {"content-length", "transfer-encoding"})


VALUES = {
    "letters": "a" * ROOM,
    "parameters": "multipart/form-data" + ";a=b" * (ROOM // 4 - 10),
    "open quotes": "multipart/form-data" + ';a="\\' * (ROOM // 6),
    "numbered parameters": "multipart/form-data" + "".join(f"; a*{index}*=''b" for index in range(ROOM // 15)),
    "encoded words": "=?utf-7?q?a?= " * (ROOM // 15),
    "commas": "," * ROOM,
    "spaces": "a" + " " * (ROOM - 2) + "b",
    "colons": "http://a" + ":" * (ROOM - 10),
    "digits": "9" * ROOM,
}


def test_header_list_contains_the_headers_that_are_read() -> None:
    assert {"content-type", "x-request-id", "access-control-request-headers", "x-session-id"} <= set(header_names())


def pause_of(opened: Endpoint, head: bytes) -> float:
    """Return the longest pause of the loop while one head is processed, in seconds."""
    beats = Beats(opened.loop)
    opened.loop.call_soon_threadsafe(beats.begin)
    with opened.connect() as connection:
        assert connection.send(head).answer()[0] in (200, 400, 401, 403, 404, 415, 421, 431)
    beats.running = False
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.003), opened.loop).result(10)
    return beats.longest


def assert_short(opened: Endpoint, what: str, head: bytes) -> None:
    """Fail if the loop is blocked for too long in each of several tries."""
    assert least(lambda: pause_of(opened, head)) < LONGEST_STALL, what


@both
@pytest.mark.timing
def test_header_of_maximum_size_does_not_block_the_loop(kind: str, tmp_path: Path) -> None:
    settings = {"batch_api": True, "batch_store": str(tmp_path)} if kind == "server" else {}
    with endpoint(kind, **settings) as opened:
        for index, name in enumerate(header_names()):
            shapes = list(VALUES) if LONG or name in _PARSED else [list(VALUES)[index % len(VALUES)]]
            for what in shapes:
                value = VALUES[what]
                host = "" if name == "host" else "Host: localhost\r\n"
                path = "/v1/files" if kind == "server" and name.startswith("content") else COMPLETIONS
                end = "Content-Length: 2\r\nConnection: close\r\n\r\n{}"
                head = f"POST {path} HTTP/1.1\r\n{host}{name}: {value}\r\n{end}"
                assert_short(opened, f"{name}: {what}", head.encode())


@both
@pytest.mark.parametrize("line", ["a:\r\n", "X-Request-Id: a\r\n", "content-type: a\r\n"])
@pytest.mark.timing
def test_many_headers_do_not_block_the_loop(kind: str, line: str) -> None:
    with endpoint(kind) as opened:
        lines = line * (ROOM // len(line))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{lines}Content-Length: 2\r\n\r\n{{}}"
        assert_short(opened, line, head.encode())


@both
@pytest.mark.parametrize("values", [1, 4], ids=["in one header", "in four headers"])
def test_large_head_is_rejected_however_it_arrives(kind: str, values: int) -> None:
    long = "".join(f"X-Long: {'x' * (90_000 // values)}\r\n" for _ in range(values))
    head = f"GET /health HTTP/1.1\r\nHost: localhost\r\n{long}\r\n"
    with endpoint(kind) as opened:
        for pieces in (1, 2, 9):
            with opened.connect() as connection:
                with suppress(OSError):  # the server may stop reading early
                    for begin in range(0, len(head), -(-len(head) // pieces)):
                        connection.send(head[begin : begin + -(-len(head) // pieces)])
                        time.sleep(0.02 if pieces > 1 else 0)
                assert connection.answer()[0] == 431, pieces


@both
def test_pipelined_head_after_a_large_body_is_not_too_large(kind: str) -> None:
    body = b'{"prompt": "a", "x": "' + b"b" * 150_000 + b'"}'
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    request = head % (COMPLETIONS.encode(), len(body)) + body
    with endpoint(kind) as opened, opened.connect() as connection:
        connection.send(request + b"GET /health HTTP/1.1\r\nHost: ")
        assert connection.answer()[0] == 200
        connection.send(b"localhost\r\n\r\n")
        assert connection.answer()[0] == 200


@pytest.mark.parametrize(
    ("value", "length"),
    [("12", 12), ("0" * 9000 + "7", 7), ("9" * 9000, 10**18), (None, None), ("", None), ("-1", None), ("\u0663", None)],
)
def test_lengths_are_read_within_bounds(value: str | None, length: int | None) -> None:
    assert length_of(value) == length
