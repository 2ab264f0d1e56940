"""Routers as processes, each started in front of workers with known addresses."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fd_core.cli.bench.compare.processes import EngineFailedError, end

from .fake_worker import MODEL, Settings
from .http import Connection, request

_START_SECONDS = 60.0
_SETTLE_SECONDS = 1.0
"""From the first answer until every worker is known to every router."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A router with one policy."""

    name: str
    command: Callable[[int, Sequence[str]], list[str]]
    """From its port and the workers' addresses."""


def fdcore(program: Path, policy: str, *more: str, name: str = "") -> Contender:
    """Return this project's router."""

    def command(port: int, workers: Sequence[str]) -> list[str]:
        flags = [flag for url in workers for flag in ("--worker", url)]
        return [str(program), "route", "--port", str(port), *flags, "--policy", policy, *more]

    return Contender(f"fd_core {name or policy}", command)


def sglang(program: Path, policy: str, *more: str, name: str = "") -> Contender:
    """Return SGLang's router, set to check for new workers every second: with the default it starts after 30."""

    def command(port: int, workers: Sequence[str]) -> list[str]:
        flags = ["--worker-urls", *workers, "--policy", policy, "--prometheus-port", str(free_port())]
        own = ["--prometheus-host", "127.0.0.1", "--worker-startup-check-interval", "1", "--log-level", "warn"]
        return [str(program), "launch", "--host", "127.0.0.1", "--port", str(port), *flags, *own, *more]

    return Contender(f"sglang-router {name or policy}", command)


def vllm(program: Path, policy: str, *more: str, name: str = "") -> Contender:
    """Return vLLM's router."""

    def command(port: int, workers: Sequence[str]) -> list[str]:
        flags = ["--worker-urls", *workers, "--policy", policy, "--prometheus-port", str(free_port())]
        own = ["--worker-startup-check-interval", "1", "--log-level", "warning"]
        return [str(program), "--host", "127.0.0.1", "--port", str(port), *flags, *own, *more]

    return Contender(f"vllm-router {name or policy}", command)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Workers:
    """The given number of fake workers, each in a separate process."""

    def __init__(self, count: int, settings: Settings, folder: Path) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self.ports: list[int] = []
        benchmarks = Path(__file__).resolve().parents[2]
        command = [sys.executable, "-m", "harness.routing.fake_worker", msgspec.json.encode(settings).decode()]
        for number in range(count):
            with (folder / f"worker{number}.log").open("w") as log:
                started = subprocess.Popen(
                    command,
                    cwd=benchmarks,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            self._processes.append(started)
        for started in self._processes:
            assert started.stdout is not None
            self.ports.append(int(started.stdout.readline()))

    @property
    def urls(self) -> list[str]:
        """Their addresses."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    async def stats(self) -> list[dict[str, int]]:
        """Return the counters of each since `reset`."""
        return [msgspec.json.decode(await _once(port, request("GET", "/stats"))) for port in self.ports]

    async def reset(self) -> None:
        """Empty their caches and counts."""
        for port in self.ports:
            await _once(port, request("POST", "/reset"))

    def close(self) -> None:
        """End them."""
        for started in self._processes:
            end(started)


class Running:
    """A started router."""

    def __init__(self, contender: Contender, workers: Sequence[str], folder: Path) -> None:
        self.name = contender.name
        self.port = free_port()
        self._log = folder / f"{contender.name.replace(' ', '-')}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                contender.command(self.port, workers), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, cwd=folder,
            )  # fmt: skip

    async def ready(self) -> None:
        """Wait until it answers. Raises EngineFailedError."""
        ask = request("POST", "/v1/chat/completions", body({"role": "user", "content": "ready?"}, tokens=1))
        until = time.monotonic() + _START_SECONDS
        while True:
            if self._process.poll() is not None:
                raise EngineFailedError(f"{self.name} ended with status {self._process.returncode}; see {self._log}")
            try:
                connection = await Connection.to(self.port)
                try:
                    if (await connection.ask(ask)).status == 200:
                        break
                finally:
                    connection.close()
            except OSError:
                pass
            if time.monotonic() > until:
                raise EngineFailedError(f"{self.name} did not answer within {_START_SECONDS:.0f} s; see {self._log}")
            await asyncio.sleep(0.1)
        await asyncio.sleep(_SETTLE_SECONDS)

    def cpu_seconds(self) -> float:
        """Return the processor time of all its threads so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        end(self._process)


def body(*messages: Mapping[str, str], tokens: int, stream: bool = True) -> bytes:
    """Return the body of a chat completion."""
    return msgspec.json.encode({"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream})


async def _once(port: int, data: bytes) -> bytes:
    connection = await Connection.to(port)
    try:
        return (await connection.ask(data)).body
    finally:
        connection.close()
