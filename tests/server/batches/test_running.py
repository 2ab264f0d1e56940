"""A run sends unanswered requests, a bounded number in parallel, and retries when there was no room."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.server.batches import running
from fd_core.server.batches.lines import BatchAnswer, BatchLine, LineError
from fd_core.server.batches.running import AsgiAnswer
from tests.server.batches import virtual_time


class Server:
    def __init__(self, statuses: Iterable[int] = (), **headers: str) -> None:
        self.statuses = iter(statuses)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.sent: list[str] = []
        self.at_once = self.most = 0

    async def ask(self, path: str, body: bytes, request_id: str) -> AsgiAnswer:
        self.sent.append(request_id)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        return AsgiAnswer(next(self.statuses, 200), {"x-request-id": request_id, **self.headers}, b"{}")


def run(server: Server, requests: list[BatchLine], at_once: int = 3, **options: Any) -> list[BatchAnswer]:
    taken: list[BatchAnswer] = []

    async def work() -> None:
        slots = asyncio.Semaphore(at_once)
        await running.run_requests(iter(requests), server.ask, taken.append, slots=slots, **options)
        assert slots._value == at_once, "a slot leaked"

    virtual_time.run(work())
    return taken


def requests(count: int) -> list[BatchLine]:
    return [BatchLine(number, f"c{number}", "/v1/completions", b"{}") for number in range(1, count + 1)]


def test_every_request_has_one_answer_with_bounded_parallelism() -> None:
    server = Server()
    taken = run(server, requests(20))
    assert sorted(answer.custom_id for answer in taken) == sorted(f"c{number}" for number in range(1, 21))
    assert server.most == 3


def test_known_answers_are_not_requested_again() -> None:
    server = Server()
    assert len(run(server, requests(5), known={2, 4})) == 3
    assert len(server.sent) == 3


def test_malformed_line_is_answered_without_being_sent() -> None:
    server = Server()
    (answer,) = run(server, [BatchLine(1, None, error=LineError("x", "line 1: no"))])
    assert not answer.ok and not server.sent


def test_rejection_without_room_is_retried() -> None:
    server = Server([503, 429, 503, 200])
    (answer,) = run(server, requests(1))
    assert answer.ok and len(server.sent) == 4 == len(set(server.sent))
    for_ever = Server([503] * 1000)
    (refused,) = run(for_ever, requests(1))
    assert refused.response is not None and refused.response.status_code == 503


def test_rate_limit_of_the_key_is_waited_out() -> None:
    server = Server([429] * 100 + [200], retry_after="1")
    (answer,) = run(server, requests(1))
    assert answer.ok and len(set(server.sent)) == 101
    never = Server([429] * 1000, x_should_retry="false")
    assert not run(never, requests(1))[0].ok and len(never.sent) == 1


def test_rate_limited_batch_sends_nothing_until_allowed() -> None:
    class Limited(Server):
        """Admits a request every ten seconds."""

        free_at = 0.0

        async def ask(self, path: str, body: bytes, request_id: str) -> AsgiAnswer:
            now = asyncio.get_running_loop().time()
            self.sent.append(request_id)
            if now < self.free_at:
                return AsgiAnswer(429, {"retry-after": str(math.ceil(self.free_at - now))}, b"{}")
            self.free_at = now + 10
            await asyncio.sleep(1)
            return AsgiAnswer(200, {}, b"{}")

    server = Limited()
    assert all(answer.ok for answer in run(server, requests(30), at_once=8))
    assert len(server.sent) <= 2 * 30, "one rejection per admitted request"


def test_rate_limited_run_holds_no_slot_while_waiting() -> None:
    limited, free = Server([429] * 50, retry_after="60"), Server()
    times: list[float] = []

    async def work() -> None:
        loop, slots = asyncio.get_running_loop(), asyncio.Semaphore(2)
        waiting = asyncio.create_task(running.run_requests(iter(requests(9)), limited.ask, print, slots=slots))
        await running.run_requests(iter(requests(50)), free.ask, lambda _: times.append(loop.time()), slots=slots)
        waiting.cancel()
        await asyncio.wait({waiting})

    virtual_time.run(work())
    assert len(times) == 50 and times[-1] < 1


def test_runs_that_share_slots_take_turns() -> None:
    order: list[str] = []

    async def work() -> None:
        slots, servers = asyncio.Semaphore(2), {"a": Server(), "b": Server(), "c": Server()}
        await asyncio.gather(
            *(
                running.run_requests(
                    iter(requests(500 if name == "a" else 10)),
                    server.ask,
                    lambda _, name=name: order.append(name),  # type: ignore[misc]
                    slots=slots,
                )
                for name, server in servers.items()
            )
        )

    virtual_time.run(work())
    assert {"b", "c"}.isdisjoint(order[40:]), "the short runs end before the long one"


@given(refusals=st.lists(st.tuples(st.sampled_from([200, 429, 503]), st.integers(0, 60)), max_size=60))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_every_request_has_one_answer_despite_rejections(refusals: list[tuple[int, int]]) -> None:
    class Random429Server(Server):
        left = iter(refusals)

        async def ask(self, path: str, body: bytes, request_id: str) -> AsgiAnswer:
            status, wait = next(self.left, (200, 0))
            await asyncio.sleep(wait / 10)
            return AsgiAnswer(status, {"retry-after": str(wait)} if status == 429 else {}, b"{}")

    taken = run(Random429Server(), requests(20))
    assert sorted(answer.custom_id or "" for answer in taken) == sorted(f"c{number}" for number in range(1, 21))
