"""Scripted workers and a gateway in front of them, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from fd_core.disagg.ticket import KV_PORT_HEADER, OUTCOME_HEADER, ROLE_HEADER, TICKET_HEADER, read_ticket
from fd_core.http.access.record import TENANT_HEADER, read_tenant
from fd_core.http.connections.listening import bind_socket
from fd_core.http.spans import RequestSpans
from fd_core.ops.polled_timeout import PolledTimeout
from fd_core.plugins import ROUTER_POLICY, installed_plugins
from fd_core.router.config import GatewayConfig, RouterConfig
from fd_core.router.gateway.serving import serve_gateway
from fd_core.router.router import Router
from fd_core.router.selection import IDLE
from fd_core.router.workers import Role
from fd_core.text.prompt_reader import ModelText
from tests.server.fakes import LiveServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ABORT = "/v1/abort_requests"
TICKET_KEY = b"k" * 32
QUICK = {"health_check_timeout_secs": 0.2}
"""Settings of a router whose workers may hang."""


def in_loop(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on a new event loop; the limit only ends a test that hangs."""

    @functools.wraps(scenario)
    def test(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(scenario(**arguments), 120))

    return test


async def eventually(condition: Callable[[], bool]) -> None:
    limit = PolledTimeout(60)
    while not condition():
        assert not limit.expired(), "timed out"
        await asyncio.sleep(0.005)


class FakeWorker:
    """Follows `script`, one word per request, then repeats `usual`."""

    def __init__(
        self, name: str = "w", usual: str = "stream", *, models: tuple[str, ...] = ("m",), role: Role = "mixed"
    ) -> None:
        self.name = name
        self.role = role
        self.reported_role: str | None = role
        self.kv_port: int | None = 7001 if role == "prefill" else None
        self.outcome: str | None = "transferred"
        """Outcome that a decode worker reports for a valid ticket; None if it does not support tickets."""
        self.peers: list[str | None] = []
        """Peers named by the tickets of requests; None for an invalid ticket."""
        self.usual = usual
        self.script: deque[str] = deque()
        self.upon: dict[bytes, str] = {}
        """Words for requests that contain certain bytes; they override the script."""
        self.models = models
        self.healthy = True
        self.health_body = ""
        """Body of the answer to a health check while it is not healthy."""
        self.checks = 0
        """Health checks that were answered."""
        self.hangs = False
        self.instance = f"{name}-1"
        self.pause = 0.0
        """Seconds before each chunk."""
        self.chunks = 4
        self.goes_on = asyncio.Event()
        """While it is not set, streams stop before their next chunk."""
        self.goes_on.set()
        self.runs: set[str] = set()
        """Ids that can be aborted."""
        self.owners: dict[str, str] = {}
        """Owners of requests, by id; those of others are not aborted."""
        self.keeps: set[str] = set()
        """Ids of responses."""
        self.seen: list[tuple[str, Mapping[str, str], bytes]] = []
        self.running = 0
        self.written = 0
        """Chunks of streams."""
        self.left = 0
        """Requests whose connection was closed before their answer ended."""
        self.url = ""

    async def __aenter__(self) -> FakeWorker:
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(self._server, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._server.connections:
            connection.force_close()
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.hangs:
            await asyncio.sleep(3600)
        if request.path == "/health":
            self.checks += 1
            text = "" if self.healthy else self.health_body
            return web.Response(text=text, status=200 if self.healthy else 503, headers=self._itself())
        if request.path == "/v1/models":
            data = [{"id": name, "object": "model", "root": name} for name in self.models]
            return web.json_response({"object": "list", "data": data})
        if request.method == "HEAD" and request.path.startswith("/v1/responses/"):
            return web.Response(status=200 if request.path.rpartition("/")[2] in self.keeps else 404)
        self.seen.append((request.raw_path, request.headers, await request.read()))
        self.running += 1
        try:
            usual = "abort" if request.path == ABORT else self.usual
            matching = (word for sign, word in self.upon.items() if sign in self.seen[-1][2])
            word = next(matching, None) or (self.script.popleft() if self.script else usual)
            return await self._act(request, word, self._read_ticket(request))
        except asyncio.CancelledError:
            self.left += 1
            raise
        except ConnectionError:
            self.left += 1
            request.protocol.force_close()
            return web.Response()
        finally:
            self.running -= 1

    def _itself(self) -> dict[str, str]:
        headers = {"X-Instance": self.instance}
        if self.reported_role is not None:
            headers[ROLE_HEADER] = self.reported_role
        if self.kv_port is not None:
            headers[KV_PORT_HEADER] = str(self.kv_port)
        return headers

    def _read_ticket(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the response header for a request with a ticket."""
        ticket = request.headers.get(TICKET_HEADER)
        if ticket is None:
            return {}
        peer = read_ticket(TICKET_KEY, request.headers["X-Request-Id"], ticket)
        self.peers.append(peer)
        return {} if peer is None or self.outcome is None else {OUTCOME_HEADER: self.outcome}

    async def _act(self, request: web.BaseRequest, word: str, extra: Mapping[str, str]) -> web.StreamResponse:
        if word == "hang":
            await asyncio.sleep(3600)
        if word == "die":
            request.protocol.force_close()
            return web.Response()
        if word.isdecimal():
            code = {"404": "model_not_found", "400": "invalid_value"}.get(word)
            return web.json_response({"error": {"message": word, "code": code}}, status=int(word), headers=extra)
        if word == "no_model":
            error = {"type": "not_found_error", "message": "the model 'm' does not exist"}
            return web.json_response({"type": "error", "error": error}, status=404)
        if word == "abort":
            return self._abort(json.loads(self.seen[-1][2]), request.headers.get(TENANT_HEADER, ""))
        if word == "json":
            await asyncio.sleep(self.pause)
            return web.json_response({"worker": self.name}, headers={"Set-Cookie": "a=b", **extra})
        if word in ("big", "big_dies"):
            size = 3 << 20
            out = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(size)})
            await out.prepare(request)
            await out.write(b" " * (size if word == "big" else size - 1))
            if word == "big_dies":
                request.protocol.force_close()
            return out
        if word == "zipped":
            headers = {"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}
            return web.Response(body=gzip.compress(b"data: [DONE]\n\n"), headers=headers)
        if word == "json_dies":
            out = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
            await out.prepare(request)
            await out.write(b'{"worker": ')
            request.protocol.force_close()
            return out
        return await self._stream(request, word, extra)

    def _abort(self, body: Any, header: str) -> web.Response:
        tenant = read_tenant(None, header.encode(), "", "", "")
        own = {each for each in self.runs if tenant is None or tenant.admin or self.owners[each] == tenant.owner}
        given = sorted(own) if body.get("abort_all") else body.get("req_ids")
        if given is None:
            return web.json_response({"error": {"message": "neither"}}, status=400)
        aborted = [each for each in given if each in own]
        self.runs -= set(aborted)
        return web.json_response({"aborted": aborted, "not_found": [each for each in given if each not in aborted]})

    async def _stream(self, request: web.BaseRequest, word: str, extra: Mapping[str, str]) -> web.StreamResponse:
        """`stream`, `head` (dies after the headers), `after:N`, `torn:N`, `stops:N`, `unended`, `error`."""
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", **extra})
        await out.prepare(request)
        await out.write(b"")
        kind, _, count = word.partition(":")
        last = int(count) if count else 0 if kind == "head" else self.chunks
        for index in range(last):
            if self.pause:
                await asyncio.sleep(self.pause)
            await self.goes_on.wait()
            await out.write(b"data: " + json.dumps({"worker": self.name, "index": index}).encode() + b"\n\n")
            self.written += 1
        if kind == "stops":
            await asyncio.sleep(3600)
        if kind == "torn":
            await out.write(b'data: {"worker": "')
        if kind in ("head", "after", "torn"):
            await asyncio.sleep(0.01)
            request.protocol.force_close()
            return out
        if kind == "error":
            await out.write(b'event: error\ndata: {"error": {"message": "own"}}\n\n')
        elif kind != "unended":
            await out.write(b"data: [DONE]\n\n")
        await out.write_eof()
        return out


class Live:
    """A running gateway and a client of it."""

    def __init__(
        self, url: str, router: Router, client: aiohttp.ClientSession, admin: str, stop: asyncio.Event
    ) -> None:
        self.url = url
        self.router = router
        self.client = client
        self.admin = admin
        self.stop = stop

    async def post(self, path: str = CHAT, body: Any = None, **headers: str) -> tuple[int, Any, bytes]:
        """Return status, headers and body of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body or {"messages": [turn("hi")], "stream": True})
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named.setdefault("Content-Type", "application/json")
        async with self.client.post(URL(self.url + path, encoded=True), data=data, headers=named) as answer:
            return answer.status, answer.headers, await answer.read()

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        async with self.client.get(self.url + path, headers=headers) as answer:
            return answer.status, await answer.read()

    async def status(self) -> dict[str, Any]:
        return dict(json.loads((await self.get("/status.json"))[1]))

    async def healthy(self, count: int) -> None:
        await eventually(lambda: sum(w.state.value == "healthy" for w in self.router.snapshot().workers) == count)

    def idle(self) -> bool:
        """Return True if every counter is exactly zero."""
        shown = self.router.snapshot()
        return shown.total == IDLE and not shown.departed and all(each.load == IDLE for each in shown.workers)

    async def wait_until_idle(self) -> None:
        await eventually(self.idle)
        assert self.router.snapshot().faults == 0


def turn(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


@contextlib.asynccontextmanager
async def routed(
    *workers: FakeWorker,
    router: dict[str, Any] | None = None,
    text: ModelText | None = None,
    learns: bool = False,
    healthy: int | None = None,
    ticket_key: bytes | None = TICKET_KEY,
    spans: RequestSpans | None = None,
    **settings: Any,
) -> AsyncIterator[Live]:
    """Run a gateway in front of running workers; at the end every counter must be zero.

    Its health checks time out only where a test sets `QUICK`: gateway, workers and client share one event loop.
    """
    config = GatewayConfig(**{"router_secret": "a secret of the cluster", "drain_seconds": 0.5} | settings)
    chosen = {"policy": "round_robin", "health_check_interval_secs": 0.05, "health_check_timeout_secs": 30.0}
    made = Router(RouterConfig(**chosen | (router or {})), partial(installed_plugins().load, ROUTER_POLICY))
    for worker in workers:
        made.register(worker.url, worker.role, 0.0)
    sock, admin_sock = bind_socket("127.0.0.1", 0), bind_socket("127.0.0.1", 0)
    admin = f"http://127.0.0.1:{admin_sock.getsockname()[1]}"
    stop, ready = asyncio.Event(), asyncio.Event()
    urls: list[str] = []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    serving = asyncio.create_task(
        serve_gateway(
            config,
            made,
            text,
            learns=learns,
            ticket_key=ticket_key,
            spans=spans,
            sock=sock,
            admin_sock=admin_sock,
            on_ready=on_ready,
            stop=stop,
        )
    )
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if serving.done():
        serving.result()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as client:
        live = Live(urls[0], made, client, admin, stop)
        await live.healthy(len(workers) if healthy is None else healthy)
        try:
            yield live
            await live.wait_until_idle()
        finally:
            stop.set()
            await asyncio.wait_for(serving, 60)


def events(body: bytes) -> list[str]:
    """Return the data of each event."""
    return [event.rpartition("data: ")[2] for event in body.decode().split("\n\n") if event]


async def leave_early(live: Live, rng: random.Random) -> None:
    """Send a request, read a little, and disconnect."""
    with contextlib.suppress(aiohttp.ClientError):
        async with live.client.post(live.url + CHAT, json={"messages": [turn("hi")], "stream": True}) as answer:
            for _ in range(rng.randrange(3)):
                await answer.content.readany()
            answer.close()


@contextlib.contextmanager
def gateway(servers: list[LiveServer], file: str, **settings: Any) -> Iterator[str]:
    """Run a router on a separate thread."""
    ready, stopped = threading.Event(), threading.Event()
    urls: list[str] = []

    async def run() -> None:
        for each in servers:
            each.role = "mixed"  # type: ignore[attr-defined]
        keys = {"api_key_file": file, "worker_api_keys": ("worker",)}
        async with routed(*servers, **keys, **settings) as running:  # type: ignore[arg-type]
            urls.append(running.url)
            ready.set()
            while not stopped.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        stopped.set()
        thread.join(60)
        assert not thread.is_alive()
