"""Messages to and from an engine's process, over a pair of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from fd_core.engine.process.message_stream import EngineSocket, MessageStream
from fd_core.engine.process.messages import Abort, ClientMessage, Delta, EngineMessage, StepEvents


class Pair:
    """The client's socket, and an engine's end that is used by hand."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.failures: list[Exception] = []
        own, engines = socket.socketpair()
        self.client = EngineSocket(own, self._hear, self.failures.append)
        self.engine = MessageStream(engines)

    def _hear(self, message: EngineMessage) -> None:
        assert isinstance(message, StepEvents)
        if message.deltas[0].request_id == "bad":
            raise LookupError("bad")
        self.heard.append(message.deltas[0].request_id)

    def say(self, *names: str) -> None:
        for name in names:
            self.engine.send(msgspec.msgpack.encode(StepEvents([Delta(name)])))

    def close(self) -> None:
        self.client.close()
        self.engine.close()


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
                pair.engine.flush()
                turns.add(len(pair.heard))
                await asyncio.sleep(0)
            assert pair.heard == names and pair.client.received == 1000 and len(turns) > 1

    asyncio.run(main())


def test_what_the_engine_does_not_read_yet_waits_and_nobody_waits_for_it() -> None:
    """More than a socket holds, both ways at once: what goes out is in order and whole."""

    async def main() -> None:
        decoder, said, names = msgspec.msgpack.Decoder(ClientMessage), [], [f"{'x' * 500}{i}" for i in range(3000)]
        async with opened() as pair:
            for name in names:
                pair.client.send(Abort((name,)))
                pair.say(name)
            assert pair.engine.unsent
            while len(said) < len(names) or pair.engine.unsent:
                pair.engine.flush()
                said += pair.engine.receive() or ()
                await asyncio.sleep(0)
            await hears(pair, len(names))
            assert [decoder.decode(each) for each in said] == [Abort((name,)) for name in names]
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


@pytest.mark.parametrize("frame", [b"\xc1", msgspec.msgpack.encode(StepEvents([Delta("bad")]))])
def test_what_cannot_be_read_or_handled_is_reported_and_the_next_is_heard(frame: bytes) -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.engine.send(frame)
            pair.say("next")
            await hears(pair, 1)
            [failure] = pair.failures
            assert isinstance(failure, msgspec.DecodeError | LookupError)

    asyncio.run(main())


def test_without_an_engine_a_message_is_lost_and_nobody_waits() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.say("a")
            await hears(pair, 1)
            pair.say("last words")
            pair.engine.close()
            await hears(pair, 2)
            for _ in range(3):
                pair.client.send(Abort(("a",)))
                await asyncio.sleep(0.01)
            pair.client.close()
            pair.client.close()

    asyncio.run(main())


def test_a_closed_socket_hands_nothing_over() -> None:
    async def main() -> None:
        async with opened() as pair:
            pair.say("a", "b")
            await hears(pair, 2)
            pair.say("c")
            pair.client.close()
            await asyncio.sleep(0.05)
            assert pair.heard == ["a", "b"]

    asyncio.run(main())
