"""Processes with few descriptors: more connections and larger bodies than fit, and the clients that follow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.processes import free_port, process

from .endpoints import COMPLETIONS, JSON, KINDS, Hostile, until
from .limits import LONG

long = pytest.mark.skipif(not LONG, reason="starts several processes; FD_HOSTILE=1 runs it")
NULL = ("serve", "null", "--backend", "null", "--num-threads", "1", "--engine", "inproc")
DESCRIPTORS = 256
MEGABYTE = 2**20


class Limited:
    """Server or router in a separate process with few descriptors."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.pid = process.pid
        self.port = port
        self.log = log

    def get(self, path: str) -> bytes:
        with Hostile(self.port) as connection:
            status, _, body = connection.head(f"GET {path}").answer()
        assert status == 200, body
        return body

    def metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.get("/metrics").decode())
        return {
            sample.name.removeprefix("fdcore_").removeprefix("router_"): sample.value
            for family in families
            for sample in family.samples
        }

    def memory(self) -> int:
        """Return the resident bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def seconds(self) -> float:
        """Return the processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def limited(log: Path, *arguments: str, path: str = "/ready") -> Iterator[Limited]:
    port = free_port()
    command = f'ulimit -n {DESCRIPTORS}; exec "$@"'
    words = ("bash", "-c", command, "bash", sys.executable, "-m", "fd_core.cli", *arguments, "--port", str(port))
    with process(log, *words) as started:
        server = Limited(started, port, log)

        def ready() -> bool:
            assert started.poll() is None, log.read_text()
            with suppress(OSError, AssertionError):
                return bool(server.get(path))
            return False

        until(ready, 60)
        yield server
        assert started.poll() is None, log.read_text()


@contextmanager
def either(kind: str, folder: Path) -> Iterator[Limited]:
    with ExitStack() as stack:
        if kind == "server":
            yield stack.enter_context(limited(folder / "server", *NULL))
            return
        worker = stack.enter_context(limited(folder / "worker", *NULL))
        route = ("route", "--worker", f"http://127.0.0.1:{worker.port}", "--tokenizer", "bytes")
        yield stack.enter_context(limited(folder / "router", *route))


@long
@pytest.mark.parametrize("kind", KINDS)
def test_more_idle_connections_than_descriptors_do_not_block_clients(kind: str, tmp_path: Path) -> None:
    with either(kind, tmp_path) as running, ExitStack() as stack:
        for _ in range(3 * DESCRIPTORS):
            stack.enter_context(Hostile(running.port))
        time.sleep(2.5)
        before = running.seconds()
        time.sleep(2)
        assert running.seconds() - before < 0.5, "it spins"
        for _ in range(5):
            with Hostile(running.port) as connection:
                assert connection.post({"prompt": "a", "max_tokens": 2}).answer()[0] == 200
        metrics = running.metrics()
        assert metrics["connections"] <= metrics["connections_limit"] < DESCRIPTORS
        assert metrics["accept_errors_total"] == 0
        assert running.log.read_text().count("--limit-concurrency") == 1


@long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timing
def test_unfinished_bodies_stay_within_the_body_budget(kind: str, tmp_path: Path) -> None:
    body = b'{"prompt": "' + b"a" * (15 * MEGABYTE)
    with either(kind, tmp_path) as running, ExitStack() as stack:
        before = running.memory()
        connections = [stack.enter_context(Hostile(running.port)) for _ in range(40)]

        def send(connection: Hostile) -> None:
            connection.head(f"POST {COMPLETIONS}", JSON, f"Content-Length: {len(body) + 1000}")
            with suppress(OSError):
                connection.send(body)

        threads = [threading.Thread(target=send, args=(each,)) for each in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert running.memory() - before < (256 + 100) * MEGABYTE
        begun = time.monotonic()
        with Hostile(running.port) as connection:
            assert connection.post({"prompt": "a", "max_tokens": 2}).answer()[0] == 200
        assert time.monotonic() - begun < 5
        assert running.metrics()["bodies_refused_total"] == 40 - 256 // 15


@pytest.mark.parametrize("words", [NULL, ("route", "--worker", "http://127.0.0.1:9")], ids=KINDS)
def test_idle_connections_are_closed_when_descriptors_run_out(words: tuple[str, ...], tmp_path: Path) -> None:
    with (
        limited(tmp_path / "log", *words, "--limit-concurrency", "5000", path="/health") as running,
        ExitStack() as stack,
    ):
        for _ in range(2 * DESCRIPTORS):
            stack.enter_context(Hostile(running.port))
        until(lambda: running.metrics()["accept_errors_total"] > 0)
        for _ in range(5):
            with Hostile(running.port) as connection:
                assert connection.head("GET /health").answer()[0] == 200
        before = running.seconds()
        time.sleep(1)
        assert running.seconds() - before < 0.5, "it spins"
