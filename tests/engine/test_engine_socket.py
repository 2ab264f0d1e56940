"""Messages to and from an engine's process, over a pair of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq

from fd_core.engine.engine_socket import EngineSocket
from fd_core.engine.messages import Abort, ClientMessage, Delta, EngineMessage, StepEvents


class Pair:
    """The client's socket, and an engine's end that is used by hand."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[str] = []
        self.failures: list[Exception] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"ipc://{folder}/s"
        self.client = EngineSocket(self._context, address, self._hear, self.failures.append)
        self.engine = self._context.socket(zmq.PAIR)
        self.engine.set_hwm(0)
        self.engine.connect(address)

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
        self.engine.close(0)
        self._context.term()


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Pair]:
    pair = Pair(folder)
    try:
        async with asyncio.timeout(10):
            yield pair
    finally:
        pair.close()


async def hears(pair: Pair, count: int) -> None:
    while len(pair.heard) < count:
        await asyncio.sleep(0.001)


def test_messages_arrive_in_order_and_others_get_their_turn(tmp_path: Path) -> None:
    """Far more than one batch: the event loop is not held until the last of them."""

    async def main() -> None:
        async with opened(tmp_path) as pair:
            names = [str(number) for number in range(1000)]
            pair.say(*names)
            time.sleep(0.1)
            turns = set()
            while len(pair.heard) < len(names):
                turns.add(len(pair.heard))
                await asyncio.sleep(0)
            assert pair.heard == names and pair.client.received == 1000 and len(turns) > 1

    asyncio.run(main())


def test_a_send_that_takes_the_sign_of_an_arrival_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        decoder = msgspec.msgpack.Decoder(ClientMessage)
        async with opened(tmp_path) as pair:
            # What is sent before the other end has connected is lost, as for an engine that is gone.
            pair.say("ready")
            await hears(pair, 1)
            for number in range(300):
                pair.say(f"{number}")
                pair.client.send(Abort((f"a{number}",)))
                pair.client.send(Abort((f"b{number}",)))
                await hears(pair, number + 2)
                said = [decoder.decode(pair.engine.recv()) for _ in range(2)]
                assert said == [Abort((f"a{number}",)), Abort((f"b{number}",))]

    asyncio.run(main())


def test_no_task_is_made_for_a_message(tmp_path: Path) -> None:
    async def main() -> None:
        made: list[object] = []

        def factory(loop: asyncio.AbstractEventLoop, work: object, **options: object) -> asyncio.Task[object]:
            made.append(work)
            return asyncio.Task(work, loop=loop, **options)  # type: ignore[arg-type]

        async with opened(tmp_path) as pair:
            asyncio.get_running_loop().set_task_factory(factory)  # type: ignore[arg-type]
            for number in range(50):
                pair.say("x")
                await hears(pair, number + 1)
            assert made == []

    asyncio.run(main())


@pytest.mark.parametrize("frame", [b"\xc1", msgspec.msgpack.encode(StepEvents([Delta("bad")]))])
def test_what_cannot_be_read_or_handled_is_reported_and_the_next_is_heard(tmp_path: Path, frame: bytes) -> None:
    async def main() -> None:
        async with opened(tmp_path) as pair:
            pair.engine.send(frame)
            pair.say("next")
            await hears(pair, 1)
            [failure] = pair.failures
            assert isinstance(failure, msgspec.DecodeError | LookupError)

    asyncio.run(main())


def test_without_an_engine_a_message_is_lost_and_nobody_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as pair:
            pair.say("a")
            await hears(pair, 1)
            pair.engine.close(0)
            await asyncio.sleep(0.05)
            pair.client.send(Abort(("a",)))
            pair.client.close()
            pair.client.close()

    asyncio.run(main())


def test_a_closed_socket_hands_nothing_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as pair:
            pair.say("a", "b")
            await hears(pair, 2)
            pair.say("c")
            pair.client.close()
            await asyncio.sleep(0.05)
            assert pair.heard == ["a", "b"]

    asyncio.run(main())
