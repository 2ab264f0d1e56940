"""Streams of a client whose engine dies and is replaced, without real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from fd_core.config import EngineConfig
from fd_core.engine.clients.client import SingleEngineClient
from fd_core.engine.process.messages import Abort, ClientMessage, EngineStats, StepEvents, Submit
from fd_core.errors import EngineDead
from fd_core.types import Delta, FinishReason
from tests.engine.helpers import null_engine
from tests.engine.stepping import greedy

A, B = greedy("a", [1], 9), greedy("b", [2], 9)


class Client(SingleEngineClient):
    """Records what it would send; the test plays the engine."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(model="fake"))
        self.sent: list[ClientMessage] = []
        self.start_epoch(1)

    def start_epoch(self, epoch: int) -> None:
        engine = null_engine()
        engine.close()
        self._engine_ready(msgspec.structs.replace(engine.info, epoch=epoch))

    def receive(self, epoch: int, *deltas: Delta) -> None:
        self._dispatch(StepEvents(list(deltas), epoch=epoch))

    def die(self) -> None:
        self._engine_lost("it died")

    async def close(self, drain_seconds: float = 0.0) -> None:
        self._fail_all("closed")

    def _send(self, message: ClientMessage) -> None:
        self.sent.append(message)


def with_b_held_back() -> tuple[Client, AsyncIterator[Delta], AsyncIterator[Delta]]:
    """Return a client and its streams: an epoch died before the first tokens of a and b, and the next one admits only
    a.
    """
    client = Client()
    a, b = client.submit(A), client.submit(B)
    client._dispatch(StepEvents([], admitted=("a", "b"), epoch=1))
    client.die()
    client.sent.clear()
    client.start_epoch(2)
    assert client.sent == [Submit(A)]
    client.sent.clear()
    return client, a, b


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__ = test.__name__
    return run


@in_a_loop
async def test_messages_of_dead_epoch_are_ignored() -> None:
    client = Client()
    stream = client.submit(A)
    client.receive(1, Delta("a", (1, 2)))
    client.die()
    client.receive(1, Delta("a", (3,)))
    client.start_epoch(2)
    client.receive(1, Delta("a", (3,), FinishReason.STOP))
    client.receive(2, Delta("a", (3, 4), FinishReason.LENGTH))
    assert [(delta.token_ids, delta.finish_reason) async for delta in stream] == [((1, 2, 3, 4), FinishReason.LENGTH)]
    assert client.active_requests == 0


@in_a_loop
async def test_new_epoch_receives_remaining_requests_and_counts_them() -> None:
    client = Client()
    client.submit(A)
    client.submit(B)
    client.receive(1, Delta("b", (7,)))
    client.sent.clear()
    client.die()
    assert client.active_requests == 2
    client.start_epoch(2)
    resubmitted = [message.spec for message in client.sent if isinstance(message, Submit)]
    assert [(spec.request_id, spec.delivered) for spec in resubmitted] == [("a", ()), ("b", (7,))]
    assert client.requests_requeued == 2
    client.die()
    client.start_epoch(3)
    assert client.requests_requeued == 4


@in_a_loop
async def test_abort_and_disconnect_between_epochs() -> None:
    client = Client()
    stream, left = client.submit(A), client.submit(B)
    client.die()
    with pytest.raises(EngineDead, match="it died"):
        client.submit(greedy("c", [3], 9))
    await left.aclose()  # type: ignore[attr-defined]
    assert client.abort(["a", "b", "c"]) == ["a"]
    assert [delta.finish_reason async for delta in stream] == [FinishReason.ABORT]
    client.sent.clear()
    client.start_epoch(2)
    assert (client.sent, client.active_requests, client.requests_requeued) == ([], 0, 0)


@in_a_loop
async def test_held_back_suspect_is_sent_after_its_predecessor() -> None:
    client, _, _ = with_b_held_back()
    client.receive(2, Delta("a", (7,)))
    assert client.sent == [Submit(B)]


@in_a_loop
async def test_held_back_suspect_ends_immediately_on_abort() -> None:
    client, a, b = with_b_held_back()
    assert client.abort(["b", "a"]) == ["b", "a"]
    assert [delta.finish_reason async for delta in b] == [FinishReason.ABORT]
    assert client.sent == [Abort(("a",))]
    client.receive(2, Delta("a", finish_reason=FinishReason.ABORT))
    assert [delta.finish_reason async for delta in a] == [FinishReason.ABORT]
    assert client.active_requests == 0
    client, _, b = with_b_held_back()
    await b.aclose()  # type: ignore[attr-defined]
    assert (client.sent, client.active_requests) == ([], 1)


@in_a_loop
async def test_request_abandoned_before_death_is_not_resubmitted() -> None:
    client = Client()
    stream = client.submit(A)
    await stream.aclose()  # type: ignore[attr-defined]
    assert client.sent[-1] == Abort(("a",))
    client.die()
    client.start_epoch(2)
    assert not [message for message in client.sent[2:] if isinstance(message, Submit)]
    assert client.active_requests == 0


@in_a_loop
async def test_permanently_lost_engine_ends_all_streams() -> None:
    client = Client()
    stream = client.submit(A)
    client.die()
    await client.close()
    with pytest.raises(EngineDead, match="closed"):
        await anext(stream)
    with pytest.raises(EngineDead, match="closed"):
        client.abort_all()


def test_statistics_of_two_engines_share_no_counters() -> None:
    EngineStats().scheduler.counters.steps += 7
    assert EngineStats().scheduler.counters.steps == 0
