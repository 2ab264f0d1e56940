"""The two loads: small requests at a fixed concurrency, and conversations with think time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .http import Answer, Connection, request
from .trace import Conversation

PATH = "/v1/chat/completions"
_CONNECTIONS = 32
"""Open from the start where requests arrive at random; more are opened where they are needed."""


class WrongAnswerError(Exception):
    """The answer differs from the worker's, so its time is invalid."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Small requests through one router, or straight to the workers, at one concurrency."""

    first_s: list[float]
    """To the first byte of each answer's body."""
    wall_s: float
    cpu_s: float
    """Processor time of the router."""

    @property
    def per_second(self) -> float:
        """Requests answered."""
        return len(self.first_s) / self.wall_s

    @property
    def cpu_each_s(self) -> float:
        """Processor time of the router for each request."""
        return self.cpu_s / len(self.first_s)


async def burst(
    ports: Sequence[int],
    bodies: Sequence[bytes],
    *,
    events: int,
    concurrency: int,
    quick_acks: bool,
    seconds: float,
    cpu: Callable[[], float],
) -> Burst:
    """Send requests in a loop on so many connections, for so long; `events` is the length of a stream, 0 for none.

    Raises WrongAnswerError, and OSError where a connection breaks.
    """
    connections = [await Connection.to(ports[at % len(ports)], quick_acks=quick_acks) for at in range(concurrency)]
    requests = [request("POST", PATH, body) for body in bodies]
    first_s: list[float] = []
    begin_cpu, begin = cpu(), time.perf_counter()
    until = begin + seconds

    async def one(connection: Connection, at: int) -> None:
        while time.perf_counter() < until:
            answer = await connection.ask(requests[at % len(requests)])
            _check(answer, events)
            first_s.append(answer.first_s)
            at += concurrency

    try:
        await asyncio.gather(*(one(connection, at) for at, connection in enumerate(connections)))
    finally:
        for connection in connections:
            connection.close()
    return Burst(first_s, time.perf_counter() - begin, cpu() - begin_cpu)


async def arrivals(
    ports: Sequence[int],
    bodies: Sequence[bytes],
    *,
    events: int,
    rate: int,
    seconds: float,
    seed: str,
    cpu: Callable[[], float],
) -> Burst:
    """Start streams at random times, `rate` a second in the mean, in an open loop; each counts from its start.

    Raises WrongAnswerError, and OSError where a connection breaks.
    """
    draw = random.Random(seed)
    requests = [request("POST", PATH, body) for body in bodies]
    free = [await Connection.to(ports[at % len(ports)], quick_acks=True) for at in range(_CONNECTIONS)]
    everyone = list(free)
    first_s: list[float] = []

    async def one(due: float, at: int) -> None:
        if not free:
            everyone.append(await Connection.to(ports[at % len(ports)], quick_acks=True))
            free.append(everyone[-1])
        connection = free.pop()
        sent = time.perf_counter()
        answer = await connection.ask(requests[at % len(requests)])
        _check(answer, events)
        first_s.append(sent - due + answer.first_s)
        free.append(connection)

    begin_cpu, begin = cpu(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            due, at = begin, 0
            while (due := due + draw.expovariate(rate)) < begin + seconds:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(one(due, at))
                at += 1
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    finally:
        for connection in everyone:
            connection.close()
    return Burst(first_s, time.perf_counter() - begin, cpu() - begin_cpu)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    conversation: str
    number: int
    first_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Think:
    """Behaviour of users."""

    users: int = 16
    """Conversations at a time."""
    mean_s: float = 0.5
    """From an answer to the next request, exponentially distributed."""
    seed: int = 0


async def replay(
    port: int, played: Sequence[Conversation], bodies: dict[str, list[bytes]], think: Think, events: int
) -> tuple[list[Turn], float]:
    """Play all conversations; return every turn and the seconds that they took together.

    `bodies` are those of each conversation by name. Pauses depend on conversation and turn alone, so that every router
    gets the same, and packets are acknowledged at once, so that what differs is the choice. Raises WrongAnswerError,
    and OSError where a connection breaks.
    """
    waiting = list(reversed(played))
    turns: list[Turn] = []
    begin = time.perf_counter()

    async def user(number: int) -> None:
        await asyncio.sleep(think.mean_s * number / think.users)
        while waiting:
            one = waiting.pop()
            pause = random.Random(f"{think.seed}/{one.name}")
            connection = await Connection.to(port, quick_acks=True)
            try:
                for at, body in enumerate(bodies[one.name]):
                    if at:
                        await asyncio.sleep(pause.expovariate(1 / think.mean_s))
                    answer = await connection.ask(request("POST", PATH, body, session=one.name))
                    _check(answer, events)
                    turns.append(Turn(one.name, at, answer.first_s, answer.end_s))
            finally:
                connection.close()

    await asyncio.gather(*(user(number) for number in range(think.users)))
    return turns, time.perf_counter() - begin


def _check(answer: Answer, events: int) -> None:
    if answer.status != 200:
        raise WrongAnswerError(f"HTTP {answer.status}: {answer.body[:200]!r}")
    if events and answer.events != events:
        raise WrongAnswerError(f"{answer.events} events instead of {events}")
