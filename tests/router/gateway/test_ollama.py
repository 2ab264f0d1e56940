"""Ollama's API through a router with keys: routes, streams, usage, and a worker that is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from aiohttp import web

from fd_core.http.access.control import ROUTES
from tests.router.gateway.fakes import FakeWorker, gateway, in_loop, routed
from tests.router.gateway.test_keys import ask, remaining
from tests.router.gateway.test_tenants import Service
from tests.server.fakes import LiveServer, key_file, live

HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 20}}
ENDED = b'{"done":true,"prompt_eval_count":7,"eval_count":3}\n'


@pytest.fixture(scope="module")
def workers() -> Iterator[list[LiveServer]]:
    with live(api_keys=("worker",)) as one, live(api_keys=("worker",), served_model_names=("other",)) as other:
        yield [one, other]


@pytest.fixture
def service(workers: list[LiveServer], tmp_path: Path) -> Iterator[Service]:
    with gateway(workers, key_file(tmp_path, {"name": "alice", "tokens_per_minute": 5000})) as url:
        yield Service(url, workers)


def test_router_offers_every_route_of_the_api(service: Service) -> None:
    for path, route in ROUTES.items():
        if path.startswith("/api/"):
            reads, opened = "GET" in route.methods, route.right == "page"
            body = None if reads else {}
            assert service.ask(None, route.methods[0], path, body)[0] == (200 if opened else 401), path
            assert service.ask("alice", route.methods[0], path, body)[0] == (200 if reads else 400), path


def test_models_of_all_workers_are_listed_and_found(service: Service) -> None:
    for path in ("/api/tags", "/api/ps"):
        assert {each["model"] for each in service.ask("alice", "GET", path)[1]["models"]} == {"fake", "other"}
    for name in ("fake", "other", "other:latest") * 2:
        status, answer = service.ask("alice", "POST", "/api/chat", HI | {"model": name, "stream": False})
        assert (status, answer.get("model", answer)) == (200, name.removesuffix(":latest"))
        assert service.ask("alice", "POST", "/api/show", {"model": name})[0] == 200
    assert service.ask("alice", "POST", "/api/chat", HI | {"model": "absent"})[0] == 404


class LinesWorker(FakeWorker):
    """Answers with three lines and the last one, unless it is lost before."""

    async def _act(self, request: web.BaseRequest, word: str, extra: Mapping[str, str]) -> web.StreamResponse:
        if word not in ("lines", "lost"):
            return await super()._act(request, word, extra)
        out = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await out.prepare(request)
        await out.write(b'{"done":false}\n' * 3 + (b'{"do' if word == "lost" else ENDED))
        if word == "lost":
            await asyncio.sleep(0.01)
            request.protocol.force_close()
        return out


@pytest.mark.parametrize(("word", "used", "end"), [("lines", 10, ENDED), ("lost", 7 + 3, b"")])
@in_loop
async def test_lines_are_relayed_and_charged(tmp_path: Path, word: str, used: int, end: bytes) -> None:
    file = key_file(tmp_path, {"name": "alice", "tokens_per_minute": 1000})
    async with LinesWorker() as worker, routed(worker, api_key_file=file) as running:
        worker.usual = word
        _, headers, first = await ask(running, path="/api/chat", body=HI)
        reserved = 1000 - remaining(headers)
        assert reserved > 20
        assert first.startswith(b'{"done":false}\n' * 3) and first.endswith(end)
        if word == "lost":
            assert "worker was lost" in json.loads(first.splitlines()[-1])["error"]
        _, headers, _ = await ask(running, path="/api/chat", body=HI)
        assert 1000 - remaining(headers) == reserved + (used if word == "lines" else reserved - 20 + 3)
