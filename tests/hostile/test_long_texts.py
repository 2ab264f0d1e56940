"""Long texts of one client do not delay others, and texts of disconnected clients are not tokenized."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fd_core.text.tokenizer import Tokenizer
from tests.server.fakes import LiveServer, live

LONG, SHORTER = 200_000, 20_000
"""Characters: one has the thread of the longest texts to itself, the other that of long texts."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the first letters of the long texts tokenized so far; each takes half a second."""
    encode = Tokenizer.encode
    letters: list[str] = []

    def slow(self: Tokenizer, text: str, *arguments: Any, **named: Any) -> list[int]:
        if len(text) == LONG:
            letters.append(text[0])
            time.sleep(0.5)
        return encode(self, text, *arguments, **named)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    return letters


@pytest.fixture(params=[{}])
def server(read: list[str], request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """Server with a slow tokenizer; the parameter holds its settings."""
    with live(**request.param) as running:
        yield running


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def send(server: LiveServer, letter: str, key: str = "", source: str = "127.0.0.1") -> socket.socket:
    """Request the tokens of a long text without waiting for the response."""
    body = json.dumps({"prompt": letter * LONG}).encode()
    names = {"host": "127.0.0.1", "content-type": "application/json", "content-length": len(body), "x-api-key": key}
    head = "POST /tokenize HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in names.items()) + "\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), source_address=(source, 0))
    connection.sendall(head.encode() + body)
    return connection


def test_text_does_not_wait_for_much_longer_texts(server: LiveServer, read: list[str]) -> None:
    waiting = [send(server, "a") for _ in range(4)]
    assert server.post("/tokenize", {"prompt": "b" * SHORTER}).json["count"] == SHORTER
    assert len(read) < 4
    for connection in waiting:
        connection.close()


def test_text_of_a_disconnected_client_is_not_tokenized(server: LiveServer, read: list[str]) -> None:
    waiting = [send(server, letter) for letter in "abcdef"]
    wait_for(lambda: read)
    for connection in waiting:
        connection.close()
    assert server.post("/tokenize", {"prompt": "z" * LONG}).status == 200
    # The server reads connections in any order: one text was being tokenized, and one more may have begun.
    assert "z" in read and len(read) <= 3


@pytest.mark.parametrize(
    ("server", "much", "little"),
    [({"api_keys": ("k1", "k2")}, {"key": "k1"}, {"key": "k2"}), ({}, {}, {"source": "127.0.0.2"})],
    ids=["keys", "addresses"],
    indirect=["server"],
)
def test_many_long_texts_of_one_client_do_not_delay_others(
    server: LiveServer, read: list[str], much: dict[str, str], little: dict[str, str]
) -> None:
    waiting = [send(server, letter, **much) for letter in "abcdefgh"]
    wait_for(lambda: read)
    time.sleep(0.1)  # the first client's other texts have to be queued first
    waiting.append(send(server, "z", **little))
    wait_for(lambda: "z" in read)
    assert len(read) <= 6
    for connection in waiting:
        connection.close()


def test_text_beyond_the_context_is_rejected_before_tokenizing(server: LiveServer, read: list[str]) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a" * LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * LONG}]}),
        ("/tokenize", {"prompt": "a" * 1_000_001}),
    ):
        answer = server.post(path, body)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "characters" in answer.error["message"]
    assert not read


def test_many_concurrent_texts_do_not_delay_health_checks(server: LiveServer, read: list[str]) -> None:
    waiting = [send(server, "a") for _ in range(8)]
    for _ in range(20):
        assert server.get("/health").status == 200
    assert len(read) < 8
    for connection in waiting:
        connection.close()
