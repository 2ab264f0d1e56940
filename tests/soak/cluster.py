"""A real `fdcore route` and its real workers, each a process that can be killed, stopped and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.process_state import lives

__all__ = ["Cluster", "Node", "Usage", "cluster_of", "eventually"]

_START_SECONDS: Final = 120.0
_END_SECONDS: Final = 60.0
_ASK_SECONDS: Final = aiohttp.ClientTimeout(total=20)
_CONNECTORS: Final = ("tcp", "shared_memory")
"""Flags of decode workers, in turn."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a process and its children."""

    descriptors: int
    threads: int
    resident_bytes: int


@dataclass(slots=True)
class Node:
    """One `fdcore` process with a dedicated port, and its engine process if it has one."""

    name: str
    role: str
    port: int
    arguments: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    killed: float = 0.0
    """Time at which `kill` observed the exit, in seconds of `time.monotonic`."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        command = [sys.executable, "-m", "fd_core.cli", *self.arguments, "--port", str(self.port)]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        self.starts += 1

    def children(self) -> list[int]:
        """Return the child processes: a worker's engine, and its grammar compilers."""
        found: list[int] = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    def engine(self) -> int:
        """Return the process id of a worker's engine."""
        (found,) = (pid for pid in self.children() if b"fd_core.engine" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return found

    def usage(self) -> Usage:
        """Add up descriptors, threads and memory of the process and its children."""
        pids = [self.pid, *self.children()]
        return Usage(
            sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),  # noqa: PTH208  # counts names, needs no paths
            sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),  # noqa: PTH208
            sum(_resident(pid) for pid in pids),
        )

    async def kill(self) -> None:
        """SIGKILL only the process itself: its children have to detect that by themselves."""
        children = self.children()
        os.kill(self.pid, signal.SIGKILL)
        assert self.process is not None
        await asyncio.to_thread(self.process.wait, 10)
        self.killed = time.monotonic()
        await eventually(lambda: not any(map(lives, children)), 15, f"an engine of {self.name} outlives its server")

    def send_all(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        for pid in (self.pid, *self.children()):
            os.kill(pid, number)

    async def leave(self) -> None:
        """Send Ctrl-C, as an operator does: the process drains and exits."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        code = await asyncio.to_thread(self.process.wait, _END_SECONDS)
        assert code in (0, 130), f"{self.name} ended with {code}:\n{self.log_text()}"

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def destroy(self) -> None:
        """Kill the process and its children, whatever their state."""
        if self.process is None or self.process.poll() is not None:
            return
        for pid in (*self.children(), self.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


@dataclass(slots=True)
class Cluster:
    """The router, its workers, and an HTTP session for their status."""

    router: Node
    workers: list[Node]
    session: aiohttp.ClientSession

    async def status(self) -> Any:
        async with self.session.get(f"{self.router.url}/status.json") as answer:
            return await answer.json()

    async def metrics(self, node: Node) -> dict[str, float]:
        """Return every sample of a node by its name and labels, as printed."""
        async with self.session.get(f"{node.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {
            name.removeprefix("fdcore_"): float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line and line[0] != "#")
        }

    async def healthy(self, *nodes: Node) -> bool:
        """Return True if the router routes requests to these nodes' present processes."""
        try:
            shown = {each["worker"]["url"]: each["state"] for each in (await self.status())["workers"]}
            return all(shown.get(node.url) == "healthy" for node in nodes) and all(
                [await self._serves(node) for node in nodes]
            )
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _serves(self, node: Node) -> bool:
        async with self.session.get(f"{node.url}/ready") as answer:
            return answer.status == 200

    async def wait_ready(self, *nodes: Node, seconds: float = _START_SECONDS) -> None:
        """Wait until these nodes are served."""
        ends = time.monotonic() + seconds
        while not await self.healthy(*nodes):
            for node in nodes:
                assert node.process is not None
                assert node.process.poll() is None, f"{node.name} exited unexpectedly:\n{node.log_text()}"
            if time.monotonic() > ends:
                logs = "\n".join(f"--- {node.name}\n{node.log_text()}" for node in (self.router, *nodes))
                raise AssertionError(f"{[node.name for node in nodes]} did not become ready:\n{logs}")
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def cluster_of(
    folder: Path, roles: Sequence[str], *, serve: Sequence[str], pair: Sequence[str], route: Sequence[str]
) -> AsyncIterator[Cluster]:
    """Run a router and a worker for each of `roles`; end all with Ctrl-C, and check their logs for tracebacks.

    `serve` and `route` are arguments of all `fdcore serve` and `fdcore route` commands, `pair` further arguments of
    prefill and decode workers. Every other worker of a role registers itself, the rest are configured in the router.
    """
    secret = folder / "secret"
    secret.write_text("a-secret-of-this-cluster\n")
    secret.chmod(0o600)
    port, admin, *ports = _free_ports(2 + len(roles))
    joins = ("--router", f"http://127.0.0.1:{admin}", "--router-secret-file", str(secret))
    shared = ("--transfer-secret-file", str(secret))
    workers: list[Node] = []
    route = [*route, "--admin-port", str(admin), "--router-secret-file", str(secret), *shared]
    for role, at in zip(roles, ports, strict=True):
        number = sum(worker.role == role for worker in workers)
        arguments = ["serve", *serve]
        if role != "mixed":
            arguments += ["--role", role, *shared, *pair]
        if role == "decode":
            arguments += ["--kv-connector", _CONNECTORS[number % len(_CONNECTORS)]]
        node = Node(f"{role}-{number + 1}", role, at, arguments, folder / f"{role}-{number + 1}.log")
        if number % 2:
            route += ["--worker" if role == "mixed" else f"--{role}", node.url]
        else:
            arguments += joins
        workers.append(node)
    router = Node("router", "router", port, ["route", *route], folder / "router.log")
    try:
        for node in (router, *workers):
            node.start()
        async with aiohttp.ClientSession(timeout=_ASK_SECONDS) as session:
            cluster = Cluster(router, workers, session)
            await cluster.wait_ready(*workers)
            yield cluster
        await asyncio.gather(*(worker.leave() for worker in workers))
        await router.leave()
        for node in (router, *workers):
            assert "Traceback" not in node.log_text(), f"{node.name}:\n{node.log_text()}"
    finally:
        for node in (router, *workers):
            node.destroy()


async def eventually(true: Any, seconds: float, otherwise: str) -> None:
    """Wait until `true()` returns true."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, otherwise
        await asyncio.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    """Return ports below the ephemeral range, so that no other process takes the port of a worker that is down."""
    found: list[int] = []
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in range(low - 1 - os.getpid() % 4000, 1024, -1):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("there are no free ports")


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
