"""Real processes: `fdcore`, and a running server."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from fd_core.ops.polled_timeout import PolledTimeout

__all__ = ["GAUGES", "Server", "free_port", "process", "running", "serving"]

GAUGES = (
    "requests_running",
    "requests_waiting",
    "slots_draining",
    "kv_blocks_used",
    "kv_blocks_fenced",
    "active_requests",
)


def _ports() -> list[int]:
    """Return every second port of this process, in random order: workers of a run side by side have different ones."""
    number, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:], os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    share = (32_768 - 20_000) // int(count)
    own = range(20_000 + int(number) * share, 20_000 + (int(number) + 1) * share, 2)
    return random.SystemRandom().sample(own, len(own))


_PORTS: Final = _ports()
"""Ports that were not returned yet."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running `fdcore serve`."""

    url: str

    def metrics(self) -> dict[str, float]:
        """Return every sample without its prefix; label values are appended in brackets."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        return {
            sample.name.removeprefix("fdcore_")
            + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    def gauges(self) -> dict[str, float]:
        """Return the gauges that only requests raise."""
        metrics = self.metrics()
        return {name: metrics[name] for name in GAUGES}


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[Server]:
    """Run `fdcore serve` and end it with Ctrl-C; it must exit cleanly without a traceback."""
    port = free_port()
    server = Server(f"http://127.0.0.1:{port}")
    with running(log, "serve", *arguments, "--port", str(port)) as started:
        limit = PolledTimeout(240)
        while not _ready(server):
            assert started.poll() is None and not limit.expired(), log.read_text()
            time.sleep(0.1)
        yield server
        assert started.poll() is None, log.read_text()


def running(log: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run `fdcore` as `process` does."""
    return process(log, sys.executable, "-m", "fd_core.cli", *arguments)


@contextmanager
def process(
    log: Path, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, end it with Ctrl-C if it still runs; it must exit cleanly without a traceback."""
    with log.open("w") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, cwd=cwd, env=env)
    try:
        yield started
        if started.poll() is None:
            started.send_signal(signal.SIGINT)
            assert started.wait(60) in (0, 130), log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait(60)


def free_port() -> int:
    """Return a free port, each once; the next one is free, too.

    The port is below the ephemeral range: an outgoing connection could otherwise take it before the server listens, or
    connect to itself.
    """
    while True:
        port = _PORTS.pop()
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


def _ready(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
