"""Messages on a byte stream that arrives in chunks of any length."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.launching.message_stream import MessageStream


class Ends:
    """A message stream and the raw socket at its other end."""

    def __init__(self) -> None:
        own, self.other = socket.socketpair()
        self.stream = MessageStream(own)

    def close(self) -> None:
        self.stream.close()
        self.other.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    opened = Ends()
    yield opened
    opened.close()


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


@given(messages=st.lists(st.binary(max_size=40)), cuts=st.lists(st.integers(1, 50)))
def test_messages_survive_any_chunking(messages: list[bytes], cuts: list[int]) -> None:
    ends, data, received = Ends(), b"".join(map(framed, messages)), []
    for cut in [*cuts, len(data) or 1]:
        ends.other.sendall(data[:cut])
        data = data[cut:]
        received += ends.stream.receive() or ()
    ends.close()
    assert received == messages


def test_no_data_differs_from_partial_message(ends: Ends) -> None:
    assert ends.stream.receive() is None
    ends.other.sendall(framed(b"abc")[:5])
    assert ends.stream.receive() == []
    assert ends.stream.receive() is None and not ends.stream.ended


def test_oversized_message_ends_stream_before_its_body() -> None:
    own, other = socket.socketpair()
    stream = MessageStream(own, limit=8)
    with other:
        other.sendall(framed(b"12345678") + framed(b"123456789")[:4])
        assert stream.receive() == [b"12345678"] and stream.ended
        other.sendall(b"more")
        assert stream.receive() is None
    stream.close()


def test_blocking_end_receives_and_sends_whole_messages(ends: Ends) -> None:
    message, answers = os.urandom(1_000_000), []

    def serve() -> None:
        for request in ends.stream:
            ends.stream.send(request)
            ends.stream.flush(wait=True)
            assert not ends.stream.unsent

    serving, parent = threading.Thread(target=serve), MessageStream(ends.other)
    serving.start()
    inbox = iter(parent)
    for body in (message, b"", b"last"):
        parent.send(body)
        parent.flush(wait=True)
        answers.append(next(inbox))
    ends.other.shutdown(socket.SHUT_WR)
    serving.join()
    assert answers == [message, b"", b"last"]


def test_final_message_is_read_before_end_of_stream(ends: Ends) -> None:
    ends.stream.send(b"never read")
    ends.other.sendall(framed(b"last"))
    ends.other.close()
    assert ends.stream.receive() == [b"last"] and not ends.stream.ended
    assert ends.stream.receive() is None and ends.stream.ended
    ends.stream.send(b"lost")
    assert not ends.stream.unsent


def test_close_flushes_unsent_data(ends: Ends) -> None:
    message = os.urandom(100_000)
    for _ in range(5):
        ends.stream.send(message)
    assert ends.stream.unsent
    received = bytearray()

    def drain() -> None:
        while data := ends.other.recv(1 << 20):
            received.extend(data)

    listening = threading.Thread(target=drain)
    listening.start()
    ends.stream.close(linger=30)
    listening.join()
    assert bytes(received) == framed(message) * 5


def test_close_does_not_wait_for_peer_that_does_not_read(ends: Ends) -> None:
    ends.stream.send(bytes(1_000_000))
    ends.stream.close(linger=0.05)
    ends.stream.close(linger=0.05)
