"""The router's own keys: limits, usage from workers, admin keys, request ids, protected pages, access log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from fd_core.http.access.keys import ApiKey
from fd_core.http.access.record import USAGE_HEADER
from tests.router.gateway.fakes import ABORT, CHAT, COMPLETIONS, FakeWorker, Live, eventually, in_loop, routed, turn
from tests.server.fakes import key_file

PROMPT = {"prompt": "x" * 40, "max_tokens": 20}
"""Ten tokens for a router without a tokenizer."""


class MeteredWorker(FakeWorker):
    """Reports the usage of its answers, as fd_core's server does, if `reports`."""

    def __init__(self, reports: bool = True) -> None:
        super().__init__("w", "json")
        self.reports = reports
        self.used = (7, 3)

    async def _act(self, request: web.BaseRequest, word: str, extra: Mapping[str, str]) -> web.StreamResponse:
        read, wrote = self.used
        if word == "json":
            usage = {"prompt_tokens": read, "completion_tokens": wrote}
            return web.json_response({"worker": "w"} | ({"usage": usage} if self.reports else {}))
        if word == "spoken":
            out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await out.prepare(request)
            for index in range(5):
                await out.write(b'data: {"index": %d}\n\n' % index)
            if self.reports and USAGE_HEADER in request.headers:
                await out.write(b": usage %d %d\n\n" % self.used)
            await out.write(b"data: [DONE]\n\n")
            return out
        return await super()._act(request, word, extra)


def remaining(headers: Mapping[str, str]) -> int:
    return int(headers["x-ratelimit-remaining-tokens"])


async def ask(live: Live, key: str = "alice", path: str = COMPLETIONS, body: Any = None, **headers: str) -> Any:
    return await live.post(path, body or PROMPT, X_Api_Key=key, **headers)


@pytest.mark.parametrize("usual", ["json", "spoken"])
@in_loop
async def test_reserved_tokens_are_settled_by_reported_usage(tmp_path: Path, usual: str) -> None:
    file = key_file(tmp_path, {"name": "alice", "tokens_per_minute": 100}, {"name": "bob"})
    async with MeteredWorker() as worker, routed(worker, api_key_file=file) as live:
        worker.usual = usual
        status, headers, body = await ask(live)
        running = 20 if usual == "spoken" else 0  # more than the usage stays reserved while the request runs
        assert (status, remaining(headers)) == (200, 90 - running)
        assert b"usage" not in body if usual == "spoken" else b"usage" in body
        _, headers, _ = await ask(live)
        assert remaining(headers) == 80 - running
        _, headers, _ = await ask(live, "bob")
        assert "x-ratelimit-remaining-tokens" not in headers
        status, headers, body = await ask(live, body={"prompt": "x", "max_tokens": 90})
        assert (status, json.loads(body)["error"]["type"]) == (429, "tokens")
        assert len(worker.seen) == 3


@in_loop
async def test_stream_without_usage_is_charged_by_its_events(tmp_path: Path) -> None:
    file = key_file(tmp_path, {"name": "alice", "tokens_per_minute": 100})
    async with MeteredWorker(reports=False) as worker, routed(worker, api_key_file=file) as live:
        worker.usual = "spoken"
        await ask(live)
        _, headers, _ = await ask(live)
        assert remaining(headers) == 100 - (10 + 6) - 30


@pytest.mark.parametrize("word", ["503", "400", "500", "die"])
@in_loop
async def test_failed_request_is_refunded(tmp_path: Path, word: str) -> None:
    file = key_file(tmp_path, {"name": "alice", "tokens_per_minute": 100, "parallel_requests": 1})
    async with MeteredWorker() as worker, routed(worker, api_key_file=file) as live:
        for _ in range(5):
            worker.script.append(word)
            assert (await ask(live))[0] in (400, 502, 503, 500)
            await asyncio.sleep(0.1)
        await live.healthy(1)
        await eventually(lambda: live.router.ready())
        async with asyncio.timeout(60):
            while (answer := await ask(live))[0] != 200:
                await asyncio.sleep(0.1)
        assert remaining(answer[1]) == 90


@in_loop
async def test_disconnect_frees_the_parallel_slot(tmp_path: Path) -> None:
    file = key_file(tmp_path, {"name": "alice", "parallel_requests": 1})
    async with MeteredWorker() as worker, routed(worker, api_key_file=file) as live:
        worker.usual = "stops:2"
        async with live.client.post(live.url + CHAT, json=PROMPT, headers={"X-Api-Key": "alice"}) as answer:
            await answer.content.readany()
            assert (await ask(live))[0] == 429
            answer.close()
        worker.usual = "json"
        async with asyncio.timeout(60):
            while (await ask(live))[0] != 200:
                await asyncio.sleep(0.02)


@in_loop
async def test_router_limits_replace_those_of_workers(tmp_path: Path) -> None:
    class Limited(MeteredWorker):
        async def _act(self, request: web.BaseRequest, word: str, extra: Mapping[str, str]) -> web.StreamResponse:
            return web.json_response({}, headers={"X-RateLimit-Limit-Requests": "5", "X-Ratelimit-Limit-Tokens": "9"})

    file = key_file(tmp_path, {"name": "alice", "requests_per_minute": 3})
    async with Limited() as worker, routed(worker, api_key_file=file, worker_api_keys=("w",)) as live:
        _, headers, _ = await ask(live)
        assert (headers.getall("x-ratelimit-limit-requests"), "x-ratelimit-limit-tokens" in headers) == (["3"], False)
        assert "X-Api-Key" not in worker.seen[0][1] and worker.seen[0][1]["Authorization"] == "Bearer w"
    async with Limited() as worker, routed(worker) as live:
        _, headers, _ = await live.post(COMPLETIONS, PROMPT, Authorization="Bearer theirs")
        assert headers["x-ratelimit-limit-requests"] == "5", "without router keys, the workers' limits apply"


@in_loop
async def test_rejections_are_counted_by_key_name(tmp_path: Path) -> None:
    file = key_file(tmp_path, {"name": "alice", "requests_per_minute": 1})
    async with MeteredWorker() as worker, routed(worker, api_key_file=file) as live:
        assert [(await ask(live))[0] for _ in range(3)] == [200, 429, 429]
        _, headers, body = await ask(live, path="/v1/messages")
        assert json.loads(body)["error"]["type"] == "rate_limit_error" and int(headers["Retry-After"]) > 50
        text = (await live.get("/metrics"))[1].decode()
        found = {
            tuple(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "fdcore_router_key_refusals_total"
        }
        assert found == {("alice", "requests"): 3}


@in_loop
async def test_key_aborts_its_own_requests_and_admin_key_all(tmp_path: Path) -> None:
    file = key_file(tmp_path, {"name": "alice"}, {"name": "bob"}, {"name": "root", "admin": True})
    async with FakeWorker(usual="stops:1") as worker, routed(worker, api_key_file=file) as live:
        body = {"messages": [turn("hi")], "stream": True}
        running = [asyncio.create_task(ask(live, key, CHAT, body, X_Request_Id=f"{key}-1")) for key in ("alice", "bob")]
        await eventually(lambda: worker.running == 2)
        worker.runs = {"alice-1", "bob-1"}
        worker.owners = {f"{each}-1": ApiKey(digest=b"", name=each).owner for each in ("alice", "bob")}
        ids = {"req_ids": ["alice-1", "chatcmpl-bob-1", "bob-1", "none"]}
        status, _, answer = await ask(live, "alice", ABORT, ids)
        assert (status, json.loads(answer)) == (
            200,
            {"aborted": ["alice-1"], "not_found": ["chatcmpl-bob-1", "bob-1", "none"]},
        )
        status, _, answer = await ask(live, "alice", ABORT, {"abort_all": True})
        assert (status, json.loads(answer)["aborted"]) == (200, []), "no request of this key is left"
        worker.script.append("400")
        assert (await ask(live, "alice", ABORT, b"[]"))[0] == 400
        assert worker.runs == {"bob-1"}
        assert json.loads((await ask(live, "root", ABORT, {"abort_all": True}))[2])["aborted"] == ["bob-1"]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@in_loop
async def test_request_id_in_use_by_another_key_is_accepted(tmp_path: Path) -> None:
    file = key_file(tmp_path, {"name": "alice"}, {"name": "bob"})
    async with FakeWorker(usual="stops:1") as worker, routed(worker, api_key_file=file) as live:
        body = {"messages": [turn("hi")], "stream": True}
        running = asyncio.create_task(ask(live, "alice", CHAT, body, X_Request_Id="mine"))
        await eventually(lambda: worker.running == 1)
        worker.script.append("json")
        _, headers, _ = await ask(live, "bob", X_Request_Id="mine")
        assert headers["X-Request-Id"] == worker.seen[-1][1]["X-Request-Id"] == "mine"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@in_loop
async def test_pages_require_a_key_if_configured(tmp_path: Path) -> None:
    file = key_file(tmp_path, {"name": "alice"})
    async with FakeWorker() as worker, routed(worker, api_key_file=file, protect_pages=True) as live:
        for path in ("/", "/status", "/status.json", "/metrics", "/version"):
            assert (await live.get(path))[0] == 401, path
            assert (await live.get(path, Authorization="Bearer alice"))[0] == 200
            assert (await live.get(path, Authorization="Basic OmFsaWNl"))[0] == 200, "Basic auth as sent by browsers"
        for path in ("/health", "/ready"):
            assert (await live.get(path))[0] == 200


@in_loop
async def test_access_log_has_one_line_per_request_with_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = key_file(tmp_path, {"name": "alice"})
    caplog.set_level(logging.INFO, "fd_core.access")
    async with MeteredWorker() as worker, routed(worker, api_key_file=file, access_log=True) as live:
        worker.script.append("spoken")
        await ask(live, path=COMPLETIONS + "?secret=sk-1", X_Request_Id="trace-1")
        await ask(live, "wrong", X_Request_Id="trace-2")
        lines = [each.fields for each in caplog.records if each.name == "fd_core.access"]  # type: ignore[attr-defined]
        good, refused = [each for each in lines if each["request_id"].startswith("trace")]
        assert good.pop("seconds") > 0
        assert good == {
            "client": "127.0.0.1",
            "method": "POST",
            "path": COMPLETIONS,
            "status": 200,
            "tokens_in": 7,
            "tokens_out": 3,
            "request_id": "trace-1",
            "key": "alice",
        }
        assert (refused["status"], refused["key"], refused["tokens_in"]) == (401, "-", 0)
        assert worker.seen[0][1]["X-Request-Id"] == "trace-1"
        assert "sk-1" not in caplog.text and "xxxx" not in caplog.text
