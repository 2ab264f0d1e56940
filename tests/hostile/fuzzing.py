"""Random requests from the OpenAPI document and damaged bodies, for servers and a router; the seed is printed.

The router has no OpenAPI document: the document of its workers describes what it forwards.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from schemathesis.generation import GenerationMode

from fd_core.config import ServerConfig
from fd_core.server.app import create_app
from tests.hostile.endpoints import on_a_thread
from tests.router.gateway.fakes import routed
from tests.server.fakes import FakeClient, LiveServer, byte_tokenizer, chat_template, key_file, live
from tests.server.random_requests import operations, send

__all__ = ["KINDS", "Fuzzed", "damaged", "fuzz", "fuzzed", "send_damaged"]

KINDS: Final = ("everything", "keys", "router")
KEY: Final = "the-key-of-this-test"
_KEPT_BY_WORKERS: Final = ("/v1/files", "/v1/batches")
_ROUND: Final = 10
"""Examples of one operation between two checks of the time limit."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """A server from the router's point of view."""

    url: str
    role: str = "mixed"


@dataclass(slots=True)
class Fuzzed:
    """Fuzzing target, its schema, and the number of requests by status."""

    kind: str
    url: str
    server: LiveServer
    operations: Sequence[Any]
    headers: Mapping[str, str]
    answers: dict[int, int] = field(default_factory=dict)
    """Number of responses by status."""

    def count(self, status: int) -> None:
        """Record a response and check that the engine is alive."""
        self.answers[status] = self.answers.get(status, 0) + 1
        assert self.server.client.alive

    @property
    def tried(self) -> int:
        return sum(self.answers.values())


@contextmanager
def fuzzed(kind: str, folder: Path) -> Iterator[Fuzzed]:
    """Run a server with all features enabled, one with rate-limited keys, or a router in front of the first."""
    options: dict[str, Any] = {"trust_request_chat_template": True, "enable_tokenizer_info_endpoint": True}
    options |= {"response_store": 50, "batch_api": kind != "router", "batch_store": str(folder / "batches")}
    headers = {}
    if kind == "keys":
        limited = {"name": "alice", "key": KEY, "requests_per_minute": 20_000, "tokens_per_minute": 10**6}
        options["api_key_file"] = key_file(folder, limited)
        headers = {"Authorization": f"Bearer {KEY}"}
    document = create_app(ServerConfig(**options), FakeClient(), byte_tokenizer(), chat_template()).openapi()
    documented = operations(document)
    with live(lambda: FakeClient("Hello", vocab_size=2**31, max_num_seqs=256), **options) as server:
        if kind != "router":
            yield Fuzzed(kind, server.url, server, documented, headers)
            return
        forwarded = [each for each in documented if each.method == "post" or each.path.startswith("/v1/models")]
        with _before(server) as url:
            yield Fuzzed(
                kind, url, server, [each for each in forwarded if not each.path.startswith(_KEPT_BY_WORKERS)], {}
            )


def fuzz(target: Fuzzed, operation: Any, mode: GenerationMode, number: int, *, examples: int, seconds: float) -> None:
    """Send `examples` random requests, and continue with further seeds until `seconds` have passed."""
    ends, examples = time.monotonic() + seconds, examples if seconds == 0 else min(examples, _ROUND)
    while True:
        send(target.url, operation, mode, examples=examples, number=number, headers=target.headers, seen=target.count)
        number += 1
        if time.monotonic() >= ends:
            return


def damaged(body: Any, rng: random.Random) -> bytes:
    """Return the JSON of `body` with bytes changed, removed or repeated, or with values swapped."""
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) or 1)
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randrange(1, 9)]
            case 2:
                data[at:at] = data[at : at + rng.randrange(1, 40)]
            case 3:
                data[at:at] = rng.choice(_WEAPONS)
            case 4:
                del data[at:]
            case 5:
                first, last = data.find(b":", at), data.find(b",", at + 1)
                if 0 <= first < last:
                    data[first + 1 : last] = rng.choice(_VALUES)
    return bytes(data)


_WEAPONS: Final = (
    *(b"\x00", b"\xff\xfe", b"\\ud800", b'"' * 9, b"[" * 600, b'{"a":' * 300, b"1e999", b"-0", b"NaN", b"\xe2\x80\xae"),
    *(b"9" * 400, b'\\u0000"', b"{{7*7}}", b"{%for x in range(9**9)%}{%endfor%}", b"<|end|>"),
)
_VALUES: Final = (
    *(b"null", b"-1", b"0", b"1e308", b"-1e308", b"2147483648", b"18446744073709551616", b"true", b'""', b"[]", b"{}"),
    *(b"0.1", b'"\\ud83d"', b'"\\u0000"', b"[[[[]]]]", b'[{"a":[null]}]', b'"' + b"a" * 5000 + b'"'),
)


def send_damaged(target: Fuzzed, path: str, body: bytes) -> int:
    """Send a raw body and return the status."""
    port = int(target.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", path, body, {"content-type": "application/json", **target.headers})
        answer = connection.getresponse()
        answer.read()
        target.count(answer.status)
        return answer.status
    finally:
        connection.close()


@contextmanager
def _before(server: LiveServer) -> Iterator[str]:
    """Run a router in front of a server; at the end all its gauges must be zero."""
    worker: Any = _Worker(server.url)
    patient = {"health_check_interval_secs": 1.0, "health_check_timeout_secs": 30.0}
    with on_a_thread(routed(worker, router=patient)) as gateway:
        yield gateway.url
