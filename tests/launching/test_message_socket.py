"""Parent's end of a message stream, on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

from fd_core.launching.message_stream import MessageSocket, MessageStream


class Pair:
    """The parent's socket, and the child's end, driven by hand."""

    def __init__(self) -> None:
        self.inbox: list[str] = []
        self.failures: list[Exception] = []
        own, childs = socket.socketpair()
        self.parent = MessageSocket(own, self._on_message, self.failures.append, limit=1000)
        self.child = MessageStream(childs)

    def _on_message(self, message: bytes) -> None:
        if message == b"bad":
            raise LookupError("bad")
        self.inbox.append(message.decode())

    def send(self, *names: str) -> None:
        for name in names:
            self.child.send(name.encode())

    def close(self) -> None:
        self.parent.close()
        self.child.close()


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Pair]:
    pair = Pair()
    try:
        async with asyncio.timeout(60):
            yield pair
    finally:
        pair.close()


async def until_received(pair: Pair, count: int) -> None:
    while len(pair.inbox) < count:
        await asyncio.sleep(0.001)


def test_event_loop_runs_while_many_messages_arrive_in_order() -> None:
    """The messages exceed what one read returns: the event loop runs between reads."""

    async def main() -> None:
        async with opened() as pair:
            names = [str(number) for number in range(1000)]
            pair.send(*names)
            time.sleep(0.1)
            turns = set()
            while len(pair.inbox) < len(names):
                pair.child.flush()
                turns.add(len(pair.inbox))
                await asyncio.sleep(0)
            assert pair.inbox == names and pair.parent.received == 1000 and len(turns) > 1

    asyncio.run(main())


def test_send_to_slow_reader_is_buffered_without_blocking() -> None:
    """More than a socket buffers, in both directions at once: messages arrive complete and in order."""

    async def main() -> None:
        delivered: list[bytes] = []
        names = [f"{'x' * 500}{i}" for i in range(3000)]
        async with opened() as pair:
            for name in names:
                pair.parent.send(name.encode())
                pair.send(name)
            assert pair.child.unsent
            while len(delivered) < len(names) or pair.child.unsent:
                pair.child.flush()
                delivered += pair.child.receive() or ()
                await asyncio.sleep(0)
            await until_received(pair, len(names))
            assert [each.decode() for each in delivered] == names
            assert pair.inbox == names

    asyncio.run(main())


def test_receiving_creates_no_tasks() -> None:
    async def main() -> None:
        made: list[object] = []

        def factory(loop: asyncio.AbstractEventLoop, work: object, **options: object) -> asyncio.Task[object]:
            made.append(work)
            return asyncio.Task(work, loop=loop, **options)  # type: ignore[arg-type]

        async with opened() as pair:
            asyncio.get_running_loop().set_task_factory(factory)  # type: ignore[arg-type]
            for number in range(50):
                pair.send("x")
                await until_received(pair, number + 1)
            assert made == []

    asyncio.run(main())


def test_handler_error_is_reported_and_next_message_delivered() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.send("bad", "next")
            await until_received(pair, 1)
            assert [type(failure) for failure in pair.failures] == [LookupError]

    asyncio.run(main())


def test_send_after_child_exit_is_dropped_without_blocking() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.send("a")
            await until_received(pair, 1)
            pair.send("last words")
            pair.child.close()
            await until_received(pair, 2)
            for _ in range(3):
                pair.parent.send(b"a")
                await asyncio.sleep(0.01)
            assert pair.parent.ended and [type(failure) for failure in pair.failures] == [EOFError]
            pair.parent.close()
            pair.parent.close()

    asyncio.run(main())


def test_oversized_message_ends_stream() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.send("a", "x" * 1001, "b")
            while not pair.failures:
                await asyncio.sleep(0.001)
            assert pair.inbox == ["a"] and pair.parent.ended
            assert [type(failure) for failure in pair.failures] == [EOFError]

    asyncio.run(main())


def test_closed_socket_delivers_nothing() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.send("a", "b")
            await until_received(pair, 2)
            pair.send("c")
            pair.parent.close()
            await asyncio.sleep(0.05)
            assert pair.inbox == ["a", "b"]

    asyncio.run(main())
