"""A run sends what has no answer yet, a bounded number at once, and tries again where there was no room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from fd_core.server.batches import running
from fd_core.server.batches.asgi import AsgiAnswer
from fd_core.server.batches.lines import BatchAnswer, BatchLine, LineError


class Server:
    def __init__(self, statuses: Iterable[int] = (), **headers: str) -> None:
        self.statuses = iter(statuses)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.asked: list[str] = []
        self.at_once = self.most = 0

    async def ask(self, path: str, body: bytes, request_id: str) -> AsgiAnswer:
        self.asked.append(request_id)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        return AsgiAnswer(next(self.statuses, 200), {"x-request-id": request_id, **self.headers}, b"{}")


def run(server: Server, requests: list[BatchLine], **options: object) -> list[BatchAnswer]:
    taken: list[BatchAnswer] = []
    asyncio.run(running.run_requests(iter(requests), server.ask, taken.append, **({"at_once": 3} | options)))
    return taken


def requests(count: int) -> list[BatchLine]:
    return [BatchLine(number, f"c{number}", "/v1/completions", b"{}") for number in range(1, count + 1)]


def test_every_request_has_one_answer_and_few_are_on_their_way() -> None:
    server = Server()
    taken = run(server, requests(20))
    assert sorted(answer.custom_id for answer in taken) == sorted(f"c{number}" for number in range(1, 21))
    assert server.most == 3


def test_known_answers_are_not_asked_for_again() -> None:
    server = Server()
    assert len(run(server, requests(5), known={"batch_req_00000002", "batch_req_00000004"})) == 3
    assert len(server.asked) == 3


def test_a_line_that_is_wrong_is_answered_without_being_sent() -> None:
    server = Server()
    (answer,) = run(server, [BatchLine(1, None, error=LineError("x", "line 1: no"))])
    assert not answer.ok and not server.asked


def test_no_room_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_PAUSE_SECONDS", 0.001)
    server = Server([503, 429, 503, 200])
    (answer,) = run(server, requests(1))
    assert answer.ok and len(server.asked) == 4 == len(set(server.asked))
    for_ever = Server([503] * 1000)
    (refused,) = run(for_ever, requests(1))
    assert refused.response is not None and refused.response.status_code == 503


def test_a_limit_of_the_key_is_waited_for_while_the_batch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_PAUSE_SECONDS", 0.0)
    server = Server([429] * 100 + [200], retry_after="1")
    (answer,) = run(server, requests(1))
    assert answer.ok and len(set(server.asked)) == 101
    cancelled = Server([429] * 1000, retry_after="1")
    (refused,) = run(cancelled, requests(1), going_on=lambda: len(cancelled.asked) < 5)
    assert refused.response is not None and refused.response.status_code == 429 and len(cancelled.asked) < 50
    never = Server([429] * 1000, x_should_retry="false")
    assert not run(never, requests(1))[0].ok and len(never.asked) == 1


def test_what_would_begin_after_the_end_is_left_out() -> None:
    server = Server()
    taken = run(server, requests(50), going_on=lambda: len(server.asked) < 5)
    assert 5 <= len(taken) < 10
