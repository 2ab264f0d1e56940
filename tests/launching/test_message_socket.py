"""The parent's end of a message stream, on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

from fd_core.launching.message_stream import MessageSocket, MessageStream


class Pair:
    """The parent's socket, and a child's end that the test drives."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.failures: list[Exception] = []
        own, childs = socket.socketpair()
        self.parent = MessageSocket(own, self._receive, self.failures.append, limit=1000)
        self.child = MessageStream(childs)

    def _receive(self, message: bytes) -> None:
        if message == b"bad":
            raise LookupError("bad")
        self.received.append(message.decode())

    def send_from_child(self, *names: str) -> None:
        for name in names:
            self.child.send(name.encode())

    def close(self) -> None:
        self.parent.close()
        self.child.close()


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Pair]:
    pair = Pair()
    try:
        async with asyncio.timeout(10):
            yield pair
    finally:
        pair.close()


async def wait_received(pair: Pair, count: int) -> None:
    while len(pair.received) < count:
        await asyncio.sleep(0.001)


def test_messages_arrive_in_order_without_starving_the_loop() -> None:
    """More messages than one read returns: other tasks of the loop get their turn before the last of them."""

    async def main() -> None:
        async with opened() as pair:
            names = [str(number) for number in range(1000)]
            pair.send_from_child(*names)
            time.sleep(0.1)
            turns = set()
            while len(pair.received) < len(names):
                pair.child.flush()
                turns.add(len(pair.received))
                await asyncio.sleep(0)
            assert pair.received == names and pair.parent.received == 1000 and len(turns) > 1

    asyncio.run(main())


def test_unread_messages_are_buffered_without_blocking_the_parent() -> None:
    """More than a socket buffer holds, in both directions at once: messages arrive in order and complete."""

    async def main() -> None:
        sent_back: list[bytes] = []
        names = [f"{'x' * 500}{i}" for i in range(3000)]
        async with opened() as pair:
            for name in names:
                pair.parent.send(name.encode())
                pair.send_from_child(name)
            assert pair.child.unsent
            while len(sent_back) < len(names) or pair.child.unsent:
                pair.child.flush()
                sent_back += pair.child.receive() or ()
                await asyncio.sleep(0)
            await wait_received(pair, len(names))
            assert [each.decode() for each in sent_back] == names
            assert pair.received == names

    asyncio.run(main())


def test_no_task_is_created_per_message() -> None:
    async def main() -> None:
        made: list[object] = []

        def factory(loop: asyncio.AbstractEventLoop, work: object, **options: object) -> asyncio.Task[object]:
            made.append(work)
            return asyncio.Task(work, loop=loop, **options)  # type: ignore[arg-type]

        async with opened() as pair:
            asyncio.get_running_loop().set_task_factory(factory)  # type: ignore[arg-type]
            for number in range(50):
                pair.send_from_child("x")
                await wait_received(pair, number + 1)
            assert made == []

    asyncio.run(main())


def test_handler_error_is_reported_and_the_next_message_handled() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.send_from_child("bad", "next")
            await wait_received(pair, 1)
            assert [type(failure) for failure in pair.failures] == [LookupError]

    asyncio.run(main())


def test_message_to_a_dead_child_is_dropped_without_blocking() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.send_from_child("a")
            await wait_received(pair, 1)
            pair.send_from_child("last words")
            pair.child.close()
            await wait_received(pair, 2)
            for _ in range(3):
                pair.parent.send(b"a")
                await asyncio.sleep(0.01)
            assert pair.parent.ended and [type(failure) for failure in pair.failures] == [EOFError]
            pair.parent.close()
            pair.parent.close()

    asyncio.run(main())


def test_oversized_message_ends_the_stream() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.send_from_child("a", "x" * 1001, "b")
            while not pair.failures:
                await asyncio.sleep(0.001)
            assert pair.received == ["a"] and pair.parent.ended
            assert [type(failure) for failure in pair.failures] == [EOFError]

    asyncio.run(main())


def test_closed_socket_delivers_nothing() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.send_from_child("a", "b")
            await wait_received(pair, 2)
            pair.send_from_child("c")
            pair.parent.close()
            await asyncio.sleep(0.05)
            assert pair.received == ["a", "b"]

    asyncio.run(main())
