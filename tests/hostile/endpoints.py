"""A server and a router with the same test interface, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from tests.router.gateway.fakes import FakeWorker, routed
from tests.server.fakes import FakeClient, live

KINDS = ("server", "router")
COMPLETIONS = "/v1/completions"
JSON = "content-type: application/json"
T = TypeVar("T")


class Hostile:
    """Connection whose raw bytes a test writes and reads."""

    def __init__(
        self, port: int, tls: ssl.SSLContext | None = None, *, window: int | None = None, source: str = "127.0.0.1"
    ) -> None:
        raw = socket.socket()
        raw.bind((source, 0))
        if window is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        raw.settimeout(30)
        raw.connect(("127.0.0.1", port))
        self.socket = raw if tls is None else tls.wrap_socket(raw, server_hostname="localhost")

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def head(self, line: str, *headers: str, host: str | None = "localhost") -> Hostile:
        """Send a request head."""
        lines = (f"{line} HTTP/1.1", *(() if host is None else (f"Host: {host}",)), *headers)
        return self.send("\r\n".join(lines) + "\r\n\r\n")

    def post(self, body: Any, path: str = COMPLETIONS, *headers: str) -> Hostile:
        data = json.dumps(body)
        return self.head(f"POST {path}", JSON, f"Content-Length: {len(data)}", *headers).send(data)

    def send(self, data: str | bytes) -> Hostile:
        self.socket.sendall(data.encode() if isinstance(data, str) else data)
        return self

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of a response that ends by its length or with the connection."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if "chunked" in headers.get("transfer-encoding", ""):
            while not body.endswith(b"0\r\n\r\n"):
                body += self._more()
        else:
            while len(body) < int(headers.get("content-length", 0)):
                body += self._more()
        return int(first.split()[1]), headers, body

    def error(self) -> tuple[int, str]:
        """Return status and code of an error in OpenAI's format."""
        status, _, body = self.answer()
        return status, json.loads(body)["error"]["code"]

    def closed_within(self, seconds: float, trickle: bytes = b"") -> float:
        """Return the seconds until the peer closes; send `trickle` repeatedly in the meantime."""
        begun = time.monotonic()
        self.socket.settimeout(0.05)
        while (passed := time.monotonic() - begun) < seconds:
            try:
                if trickle:
                    self.socket.sendall(trickle)
                if not self.socket.recv(65536):
                    return passed
            except TimeoutError:
                continue
            except OSError:
                return passed
        raise AssertionError(f"still open after {seconds} s")

    def _more(self) -> bytes:
        data = self.socket.recv(65536)
        assert data, "the connection closed before the response ended"
        return data


class Endpoint:
    """Listening server with an engine, or router with one worker."""

    def __init__(
        self, kind: str, port: int, inner: Any, prefix: str, loop: asyncio.AbstractEventLoop, admin: str = ""
    ) -> None:
        self.kind = kind
        self.loop = loop
        self.port = port
        self.inner = inner
        """Engine client of a server, or worker of a router."""
        self.admin = admin
        """Address of the router's admin port."""
        self._prefix = prefix

    def connect(self, **options: Any) -> Hostile:
        return Hostile(self.port, **options)

    def get(self, path: str, *headers: str, host: str | None = "localhost") -> tuple[int, dict[str, str], bytes]:
        with self.connect() as connection:
            return connection.head(f"GET {path}", *headers, host=host).answer()

    def metrics(self, connection: Hostile | None = None) -> dict[str, float]:
        """Return samples without the prefix of their kind; label values are in brackets."""
        answer = self.get("/metrics") if connection is None else connection.head("GET /metrics").answer()
        text = answer[2].decode()
        return {
            sample.name.removeprefix(self._prefix)
            + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def hold(self) -> None:
        """Keep further requests without answering them."""
        if self.kind == "server":
            self.inner.held = True
        else:
            self.inner.usual = "hang"

    def release(self) -> None:
        """Answer requests again."""
        if self.kind == "server":
            self.inner.held = False
        else:
            self.inner.usual = "json"

    def requests(self) -> int:
        """Return the number of requests in progress."""
        return len(self.inner.live) if self.kind == "server" else self.inner.running


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for a condition; the timeout allows for a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def endpoint(kind: str, **settings: Any) -> Iterator[Endpoint]:
    """Run a server or a router until the block ends."""
    if kind == "server":
        with live(FakeClient, **settings) as server:
            yield Endpoint(kind, server.port, server.client, "fdcore_", server.call(asyncio.get_running_loop))
        return
    with _router(**settings) as (port, worker, loop, admin):
        yield Endpoint(kind, port, worker, "fdcore_router_", loop, admin)


@contextmanager
def _router(**settings: Any) -> Iterator[tuple[int, FakeWorker, asyncio.AbstractEventLoop, str]]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[tuple[int, FakeWorker, asyncio.AbstractEventLoop, str]]:
        async with FakeWorker(usual="json") as worker, routed(worker, **settings) as gateway:
            port = int(gateway.url.rpartition(":")[2])
            yield port, worker, asyncio.get_running_loop(), gateway.admin

    with on_a_thread(opened()) as found:
        yield found


@contextmanager
def on_a_thread(opened: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Keep a context open on an event loop in a separate thread until the block ends; re-raise its exceptions."""
    ready: Future[tuple[T, Callable[[], None]]] = Future()

    async def run() -> None:
        async with opened as found:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            ready.set_result((found, lambda: loop.call_soon_threadsafe(ended.set)))
            await ended.wait()

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(asyncio.run, run())
        running.add_done_callback(
            lambda _: ready.done() or ready.set_exception(running.exception() or CancelledError())
        )
        found, end = ready.result(30)
        try:
            yield found
        finally:
            end()
            running.result(30)
