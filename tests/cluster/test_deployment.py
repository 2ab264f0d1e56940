"""Whole deployments on this machine: real routers and workers that die and scale under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fd_core.cluster.config import cluster_config
from fd_core.cluster.controller import ClusterNote
from fd_core.cluster.deployment import Deployment
from fd_core.cluster.scaling import GroupLoad, ScalingPolicy
from fd_core.launching.spawn import SpawnLauncher
from tests.process_state import lives
from tests.server.processes import free_port

NULL = {
    "backend": "null",
    "max-model-len": 8192,
    "max-num-seqs": 16,
    "num-kv-blocks": 2048,
    "block-size": 16,
    "num-threads": 1,
    "log-level": "warning",
}
ROUTER = {"tokenizer": "bytes", "health-check-interval-secs": 0.5, "log-level": "warning"}
SECONDS = 100.0
"""Timeout in seconds; the machine may be slow and shared."""


class Given(ScalingPolicy):
    """Policy that proposes what the test sets."""

    def __init__(self) -> None:
        self.wanted = 1

    def propose(self, load: GroupLoad, now: float) -> int:
        return self.wanted


def table(**workers: Any) -> dict[str, Any]:
    return {
        "model": "null",
        "port": 0,
        "drain-seconds": 30,
        "router": {"port": 0, "settings": ROUTER},
        "workers": {name: {"cores": 0, "settings": NULL, **group} for name, group in workers.items()},
    }


async def until(true: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < ends, what
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def deployed(deployment: Deployment, notes: list[ClusterNote]) -> AsyncIterator[None]:
    """Run a deployment, and end it like Ctrl-C: it must drain and leave no process."""
    stop, hurry, ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(deployment.run(stop, hurry, ready.set))
    try:
        await until(lambda: ready.is_set() or running.done(), f"it is not ready: {notes}")
        assert not running.done(), notes
        yield
    finally:
        stop.set()
        await asyncio.wait_for(running, SECONDS)
    assert deployment.controller.over and not deployment.held
    assert not [note for note in notes if "killed" in note.text]


async def stream_dies(url: str, kill: Callable[[], None]) -> str:
    """Return the last event of a stream whose worker is killed."""
    body = {"prompt": "hello", "max_tokens": 8000, "stream": True, "ignore_eos": True}
    last = b""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line.strip():
                if not last:
                    kill()
                last = line
    return last.decode()


@dataclass
class Traffic:
    """Requests that clients sent, and those not answered in full."""

    requests: int = 0
    lost: list[str] = field(default_factory=list)


async def client(url: str, traffic: Traffic, session: aiohttp.ClientSession) -> None:
    """Send requests repeatedly, with a pause that leaves CPU time to starting processes."""
    body = {"prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True, "seed": 7, "temperature": 1.0}
    while True:
        traffic.requests += 1
        try:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                text = (await answer.read()).decode()
            if answer.status != 200 or not text.rstrip().endswith("data: [DONE]"):
                traffic.lost.append(f"{answer.status}: {text[-300:]}")
        except aiohttp.ClientError as error:
            traffic.lost.append(f"{type(error).__name__}: {error}")
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def asking(url: str, *, may_lose: int = 0) -> AsyncIterator[Traffic]:
    """Run four clients within the block; at most `may_lose` of their requests may be lost."""
    traffic = Traffic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
        clients = [asyncio.create_task(client(url, traffic, session)) for _ in range(4)]
        try:
            yield traffic
        finally:
            for each in clients:
                each.cancel()
    print(f"{traffic.requests} requests, {len(traffic.lost)} lost")
    assert len(traffic.lost) <= may_lose, traffic.lost[:3]


def pids_of(deployment: Deployment, group: str) -> dict[str, int]:
    return {each.name: each.process.pid for each in deployment.held.values() if each.group == group and each.process}


@pytest.mark.soak
def test_worker_replacement_and_scaling_lose_no_request() -> None:
    async def scenario() -> None:
        notes: list[ClusterNote] = []
        policy = Given()
        config = cluster_config(table(mixed={"min": 1, "max": 3}))
        deployment = Deployment(config, SpawnLauncher(), {"mixed": policy}, os.environ, notes.append)
        async with deployed(deployment, notes):
            (url,) = deployment.urls
            (first,) = pids_of(deployment, "mixed").items()
            last = await stream_dies(url, lambda: os.kill(first[1], signal.SIGKILL))
            assert "[DONE]" not in last and "worker_lost" in last
            await until(lambda: [each.name for each in deployment.ready("mixed")] == ["mixed-2"], "it is not replaced")
            await until(lambda: serves(url), "the router does not know the new worker")
            async with asking(url) as count:
                policy.wanted = 2
                await until(lambda: len(deployment.ready("mixed")) == 2, "it does not grow")
                before = count.requests
                await until(lambda: count.requests > before + 12, "unknown path")
                policy.wanted = 1
                await until(lambda: len(pids_of(deployment, "mixed")) == 1, "it does not shrink")
        assert [note.text for note in notes if note.text.startswith("mixed: ")] == ["mixed: 1 -> 2", "mixed: 2 -> 1"]

    asyncio.run(asyncio.wait_for(scenario(), 3 * SECONDS))


def serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Yield a function that starts `fdcore cluster serve` for one worker, with its log and its `deployment.toml`."""
    port = free_port()
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in NULL.items())
    file = tmp_path / "deployment.toml"
    file.write_text(
        f'model = "null"\nport = {port}\n[router]\nport = 0\nsettings = {{tokenizer = "bytes"}}\n'
        f"[workers.mixed]\ncores = 0\n[workers.mixed.settings]\n{settings}\n"
    )
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("w") as log:
            line = (sys.executable, "-m", "fd_core.cli", "cluster", "serve", str(file))
            process = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)
        started.append(process)
        ends = time.monotonic() + SECONDS
        while not serves(f"http://127.0.0.1:{port}"):
            assert process.poll() is None and time.monotonic() < ends, (tmp_path / "log").read_text()
            time.sleep(0.1)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def test_killed_command_leaves_no_process_and_hides_secrets(command) -> None:
    process = command()
    below = family(process.pid)[1:]
    assert len(below) >= 3  # router, worker, its engine
    lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below)
    assert b"secret" not in lines and b"key" not in lines
    process.kill()
    ends = time.monotonic() + SECONDS
    while any(map(lives, below)):
        assert time.monotonic() < ends, [pid for pid in below if lives(pid)]
        time.sleep(0.1)
