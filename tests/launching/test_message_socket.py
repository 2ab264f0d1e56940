"""A parent's end of a stream of messages, on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

from fd_core.launching.message_stream import MessageSocket, MessageStream


class Pair:
    """The parent's socket, and a child's end that is used by hand."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.failures: list[Exception] = []
        own, childs = socket.socketpair()
        self.parent = MessageSocket(own, self._hear, self.failures.append, limit=1000)
        self.child = MessageStream(childs)

    def _hear(self, message: bytes) -> None:
        if message == b"bad":
            raise LookupError("bad")
        self.heard.append(message.decode())

    def say(self, *names: str) -> None:
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


async def hears(pair: Pair, count: int) -> None:
    while len(pair.heard) < count:
        await asyncio.sleep(0.001)


def test_messages_arrive_in_order_and_others_get_their_turn() -> None:
    """Far more than is read at once: the event loop is not held until the last of them."""

    async def main() -> None:
        async with opened() as pair:
            names = [str(number) for number in range(1000)]
            pair.say(*names)
            time.sleep(0.1)
            turns = set()
            while len(pair.heard) < len(names):
                pair.child.flush()
                turns.add(len(pair.heard))
                await asyncio.sleep(0)
            assert pair.heard == names and pair.parent.received == 1000 and len(turns) > 1

    asyncio.run(main())


def test_what_the_child_does_not_read_yet_waits_and_nobody_waits_for_it() -> None:
    """More than a socket holds, both ways at once: what goes out is in order and whole."""

    async def main() -> None:
        said: list[bytes] = []
        names = [f"{'x' * 500}{i}" for i in range(3000)]
        async with opened() as pair:
            for name in names:
                pair.parent.send(name.encode())
                pair.say(name)
            assert pair.child.unsent
            while len(said) < len(names) or pair.child.unsent:
                pair.child.flush()
                said += pair.child.receive() or ()
                await asyncio.sleep(0)
            await hears(pair, len(names))
            assert [each.decode() for each in said] == names
            assert pair.heard == names

    asyncio.run(main())


def test_no_task_is_made_for_a_message() -> None:
    async def main() -> None:
        made: list[object] = []

        def factory(loop: asyncio.AbstractEventLoop, work: object, **options: object) -> asyncio.Task[object]:
            made.append(work)
            return asyncio.Task(work, loop=loop, **options)  # type: ignore[arg-type]

        async with opened() as pair:
            asyncio.get_running_loop().set_task_factory(factory)  # type: ignore[arg-type]
            for number in range(50):
                pair.say("x")
                await hears(pair, number + 1)
            assert made == []

    asyncio.run(main())


def test_what_cannot_be_handled_is_reported_and_the_next_is_heard() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.say("bad", "next")
            await hears(pair, 1)
            assert [type(failure) for failure in pair.failures] == [LookupError]

    asyncio.run(main())


def test_without_a_child_a_message_is_lost_and_nobody_waits() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.say("a")
            await hears(pair, 1)
            pair.say("last words")
            pair.child.close()
            await hears(pair, 2)
            for _ in range(3):
                pair.parent.send(b"a")
                await asyncio.sleep(0.01)
            assert pair.parent.ended and [type(failure) for failure in pair.failures] == [EOFError]
            pair.parent.close()
            pair.parent.close()

    asyncio.run(main())


def test_a_message_beyond_the_limit_is_the_last() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.say("a", "x" * 1001, "b")
            while not pair.failures:
                await asyncio.sleep(0.001)
            assert pair.heard == ["a"] and pair.parent.ended
            assert [type(failure) for failure in pair.failures] == [EOFError]

    asyncio.run(main())


def test_a_closed_socket_hands_nothing_over() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.say("a", "b")
            await hears(pair, 2)
            pair.say("c")
            pair.parent.close()
            await asyncio.sleep(0.05)
            assert pair.heard == ["a", "b"]

    asyncio.run(main())
