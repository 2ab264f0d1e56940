"""Faults of real processes under load, and the tables of docs/reliability.md.

    python -m tests.hostile.faults [--times N] [--write] [NAME ...]

Clients do what OpenAI's clients do: a refused connection and a 503 are tried again. Everything else is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.server.processes import GAUGES
from tests.soak.cluster import Cluster, Node, cluster_of
from tests.soak.watching import at_rest

__all__ = ["FAULTS", "Count", "Fault", "table", "try_fault"]

_TOKENS: Final = 250
_AT_ONCE: Final = 8
_PROMPTS: Final = [f"prompt number {number}, " * (2 + number % 3) for number in range(10)]
_NULL: Final = (
    *("null", "--backend", "null", "--max-model-len", "400", "--block-size", "16", "--num-threads", "1"),
    *("--log-level", "warning", "--no-batch-api", "--watchdog-seconds", "3", "--max-num-seqs", "200"),
)
_SERVE: Final = (*_NULL, "--num-kv-blocks", "110", "--timeout-headers", "1", "--timeout-body", "1")
_ROUTE: Final = (
    *("--health-check-interval-secs", "0.5", "--health-check-timeout-secs", "2", "--unreachable-timeout", "6"),
    *("--tokenizer", "bytes", "--max-attempts", "6"),
)
_ROLES: Final = ("prefill", "decode", "mixed") * 2
_SPARE_DESCRIPTORS: Final = 16
_CLOCK: Final = """
import os, time
_time = time.time
def _offset():
    try:
        with open(os.environ["FD_CLOCK"]) as file: return float(file.read() or 0)
    except OSError: return 0.0
time.time = lambda: _time() + _offset()
time.time_ns = lambda: int(time.time() * 1e9)
"""
"""Imported by every Python process that is started: its wall clock is off by what a file says."""


@dataclass(slots=True)
class Count:
    """What became of the requests."""

    tried: int = 0
    requests: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """What the client was told about each request that ended without its text."""
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    stall: float = 0.0


@dataclass(slots=True)
class Scene:
    """What a fault befalls: one server, or a router and its workers."""

    front: Node
    workers: list[Node]
    session: aiohttp.ClientSession
    cluster: Cluster | None = None
    clock: Path | None = None
    store: Any = None
    begun: int = 0
    """Streams that run."""

    @property
    def server(self) -> Node:
        return self.workers[0]

    @property
    def engine(self) -> int:
        return next(iter(self.server.children()))

    def of(self, role: str) -> Node:
        return next(worker for worker in self.workers if worker.role == role)

    async def metrics(self, node: Node) -> dict[str, float]:
        return await Cluster(self.front, self.workers, self.session).metrics(node)

    async def busy(self, streams: int = 4) -> None:
        """Wait until so many streams run."""
        async with asyncio.timeout(30):
            while self.begun < streams:
                await asyncio.sleep(0.002)

    async def well(self) -> None:
        """Wait until everything is served again."""
        if self.cluster is not None:
            await self.cluster.come_up(*self.workers)
            return
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with self.session.get(f"{self.server.url}/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)


Does = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table."""

    name: str
    does: Does
    place: str = "server"
    """`server`, `cluster`, `clock`, or the kind of its store: `disk`, `redis`."""
    at_once: int = _AT_ONCE
    may_lose: int = 0
    """Requests at most, each time: what a process that ends has begun to answer, and what is sent in that moment."""


async def _ask(scene: Scene, prompt: str, golden: dict[str, str], count: Count) -> None:
    count.requests += 1
    since, text, done, begun = time.monotonic(), "", False, False
    body = {"prompt": prompt, "max_tokens": _TOKENS, "seed": 7, "temperature": 1.0, "stream": True, "ignore_eos": True}

    def heard() -> None:
        nonlocal since
        now = time.monotonic()
        count.stall, since = max(count.stall, now - since), now

    try:
        while True:
            try:
                answer = await scene.session.post(f"{scene.front.url}/v1/completions", json=body)
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.1)
                continue
            if answer.status != 503:
                break
            answer.close()
            await asyncio.sleep(0.1)
        async with answer:
            if answer.status != 200:
                count.lost[f"status {answer.status}"] += 1
                return
            async for line in answer.content:
                heard()
                if not begun:
                    begun = True
                    scene.begun += 1
                data = line.strip().removeprefix(b"data: ")
                if line.startswith(b"data: ") and data == b"[DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    event = json.loads(data)
                    if "error" in event:
                        count.lost[f"error event {event['error']['code']}"] += 1
                        break
                    text += "".join(choice["text"] for choice in event["choices"])
            else:
                if not done:
                    count.wrong.append(f"the stream of {prompt!r} ended as if it were whole")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        count.lost[f"connection {type(error).__name__}"] += 1
    finally:
        scene.begun -= begun
    whole = golden.setdefault(prompt, text) if done else golden.get(prompt, text)
    if text != whole if done else not whole.startswith(text.rstrip("\ufffd")):
        count.wrong.append(f"{text[:60]!r} instead of {whole[:60]!r}")


async def try_fault(fault: Fault, folder: Path, times: int = 1) -> Count:
    """Let a fault befall processes under load and count what became of the requests."""
    count, golden, stop = Count(), {}, asyncio.Event()
    async with _scene(fault, folder) as scene:
        for prompt in _PROMPTS:
            await _ask(scene, prompt, golden, Count())
        await _rest(scene)
        before = {node.name: node.usage().descriptors for node in scene.workers}

        async def load(number: int) -> None:
            while not stop.is_set():
                await _ask(scene, _PROMPTS[number % len(_PROMPTS)], golden, count)
                number += 1

        async def look() -> None:
            since = time.monotonic()
            while not stop.is_set():
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with scene.session.get(f"{scene.front.url}/health"):
                        count.stall, since = max(count.stall, time.monotonic() - since), time.monotonic()
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(load(number)) for number in range(fault.at_once)]
        tasks.append(asyncio.create_task(look()))
        try:
            for _ in range(times):
                await scene.busy(fault.at_once // 2)
                await fault.does(scene)
                await scene.well()
                count.tried += 1
            await asyncio.sleep(0.3)
            stop.set()
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        try:
            await _rest(scene)
        except AssertionError as error:
            count.leaked.append(str(error))
        ends, grown = time.monotonic() + 20.0, before
        while grown and time.monotonic() < ends:  # connections between workers are closed when they are idle
            await asyncio.sleep(0.2)
            after = {node.name: node.usage().descriptors for node in scene.workers}
            grown = {name: now for name, now in after.items() if now > before[name] + _SPARE_DESCRIPTORS}
        count.leaked += [f"descriptors of {name}: {before[name]} became {now}" for name, now in grown.items()]
        others = [f"the {len(golden)} prompts have {len(_PROMPTS)} texts"] if len(golden) != len(_PROMPTS) else []
        count.wrong += others
    return count


async def _rest(scene: Scene) -> None:
    """Wait until nothing is held for requests, and no connection is open but ours."""
    if scene.cluster is not None:
        await at_rest(scene.cluster, 10.0)
        return
    ends = time.monotonic() + 10.0
    while True:
        metrics = await scene.metrics(scene.server)
        left = {name: metrics[name] for name in (*GAUGES, "requests_loading") if metrics[name]}
        if metrics["connections"] > 4 * _AT_ONCE:
            left["connections"] = metrics["connections"]
        if not left:
            return
        assert time.monotonic() < ends, f"still held: {left}"
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _scene(fault: Fault, folder: Path) -> AsyncIterator[Scene]:
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        contextlib.AsyncExitStack() as on,
    ):
        if fault.place == "cluster":
            made = cluster_of(
                folder, _ROLES, serve=(*_NULL, "--num-kv-blocks", "4000"), pair=("--lease-seconds", "2"), route=_ROUTE
            )
            cluster = await on.enter_async_context(made)
            yield Scene(cluster.router, cluster.workers, session, cluster)
            return
        options, store, clock = list(_SERVE), None, None
        if fault.place in ("disk", "redis"):
            store = on.enter_context(_redis() if fault.place == "redis" else _volume(folder / "kv"))
            location = f"disk:{store}" if fault.place == "disk" else f"redis+unix://{store.socket}"
            secret = folder / "secret"
            secret.write_text("a secret of all engines of this test")
            secret.chmod(0o600)
            options += ["--kv-store", location, "--kv-store-secret-file", str(secret), "--host-kv-memory", "1024"]
        if fault.place == "clock":
            clock = folder / "clock"
            (folder / "sitecustomize.py").write_text(_CLOCK)
            on.enter_context(_environment(PYTHONPATH=str(folder), FD_CLOCK=str(clock)))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        node = Node("server", "mixed", port, ["serve", *options], folder / "server.log")
        node.start()
        try:
            scene = Scene(node, [node], session, clock=clock, store=store)
            await scene.well()
            yield scene
            await node.leave()
            assert "Traceback" not in node.said(), node.said()
        finally:
            node.destroy()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _redis() -> Iterator[Any]:
    sys.path.append(str(Path(__file__).parents[2] / "plugins" / "storage_redis" / "tests"))
    from servers import Server

    server = Server("--maxmemory-policy", "noeviction")
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def _volume(folder: Path) -> Iterator[Path]:
    """A small file system in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700,size=8m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _kill_engine(kind: signal.Signals, seconds: float) -> Does:
    async def does(scene: Scene) -> None:
        epoch = (await scene.metrics(scene.server))["engine_epoch"]
        pid = scene.engine
        os.kill(pid, kind)
        if seconds:
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            return
        await _another_engine(scene, epoch)

    return does


async def _another_engine(scene: Scene, epoch: float) -> None:
    async with asyncio.timeout(60):
        while (await scene.metrics(scene.server))["engine_epoch"] == epoch:
            await asyncio.sleep(0.1)


async def _engine_out_of_memory(scene: Scene) -> None:
    """Nothing can be mapped in the engine's process any more; what waits there needs memory."""
    epoch, pid = (await scene.metrics(scene.server))["engine_epoch"], scene.engine
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, hard))
    await asyncio.sleep(1.5)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))
        return
    await _another_engine(scene, epoch)


def _kill(who: str) -> Does:
    async def does(scene: Scene) -> None:
        node = scene.front if who == "router" else scene.of(who)
        await node.kill()
        await asyncio.sleep(0.2)
        node.start()

    return does


def _stop(who: str, seconds: float) -> Does:
    async def does(scene: Scene) -> None:
        node = scene.front if who == "router" else scene.of(who)
        node.send_all(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        node.send_all(signal.SIGCONT)

    return does


async def _no_descriptors(scene: Scene) -> None:
    """The server may open three more files; 40 connections come."""
    pid = scene.server.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    top = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (top + 3, hard))
    idle = [socket.create_connection(("127.0.0.1", scene.server.port)) for _ in range(40)]
    await asyncio.sleep(2)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    for one in idle:
        one.close()


async def _clock_jumps(scene: Scene) -> None:
    assert scene.clock is not None
    for seconds in (-3600, 86_400 * 400, 0, -(10**9), 3):
        scene.clock.write_text(str(seconds))
        models = await (await scene.session.get(f"{scene.server.url}/v1/completions")).read()
        assert models is not None
        asked = {"prompt": "x", "max_tokens": 1}
        async with scene.session.post(f"{scene.server.url}/v1/completions", json=asked) as answer:
            said = (await answer.json())["created"] - time.time()
        assert abs(said - seconds) < 5, f"the child's clock is off by {said:.0f} s and not by {seconds}"
        await asyncio.sleep(0.5)


async def _slow_readers(scene: Scene) -> None:
    """Twenty clients that ask for streams and read nothing, or a few bytes a second."""
    with contextlib.ExitStack() as stack:
        ask = json.dumps({"prompt": "slow", "max_tokens": 390, "stream": True, "ignore_eos": True}).encode()
        readers = [stack.enter_context(_connection(scene, 1024)) for _ in range(20)]
        for reader in readers:
            reader.sendall(_head(len(ask)) + ask)
        for _ in range(20):
            await asyncio.sleep(0.1)
            for reader in readers[::2]:
                with contextlib.suppress(OSError):
                    reader.recv(16)


async def _half_open(scene: Scene) -> None:
    """Connections on which nothing, half a head, half a body or a whole request comes, and then nobody is there."""
    with contextlib.ExitStack() as stack:
        body = json.dumps({"prompt": "gone", "max_tokens": 300, "stream": True, "ignore_eos": True}).encode()
        for number in range(40):
            one = stack.enter_context(_connection(scene, 1024))
            whole = _head(len(body)) + body
            one.sendall((b"", whole[:30], whole[:-20], whole)[number % 4])
            if number % 8 == 7:
                # TCP_REPAIR: the socket vanishes without a word to the other side.
                with contextlib.suppress(PermissionError):
                    one.setsockopt(socket.IPPROTO_TCP, 19, 1)
                one.close()
        await asyncio.sleep(3)


def _head(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )


def _connection(scene: Scene, window: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    made.connect(("127.0.0.1", scene.front.port))
    return made


async def _full_disk(scene: Scene) -> None:
    filler = scene.store / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while file.write(bytes(1 << 16)):
            file.flush()
    await asyncio.sleep(1.5)
    filler.unlink()


async def _read_only_disk(scene: Scene) -> None:
    for mode in ("ro", "rw"):
        subprocess.run(["mount", "-o", f"remount,{mode}", scene.store], check=True)
        await asyncio.sleep(1.5)


async def _redis_killed(scene: Scene) -> None:
    await asyncio.to_thread(scene.store.kill)
    await asyncio.sleep(1.0)
    await asyncio.to_thread(scene.store.start)


def _redis_stopped(seconds: float) -> Does:
    async def does(scene: Scene) -> None:
        with scene.store.frozen():
            await asyncio.sleep(seconds)

    return does


_STOP, _HANG = 1.0, 8.0
FAULTS: Final = (
    Fault("engine: kill -9", _kill_engine(signal.SIGKILL, 0)),
    Fault("engine: stopped for 1 s", _kill_engine(signal.SIGSTOP, _STOP)),
    Fault("engine: hangs", _kill_engine(signal.SIGSTOP, 0)),
    Fault("engine: out of memory for 1.5 s", _engine_out_of_memory),
    Fault("server: kill -9", _kill("mixed"), may_lose=2 * _AT_ONCE),
    Fault("server: stopped for 1 s", _stop("mixed", _STOP)),
    Fault("server: descriptors exhausted, 40 connections", _no_descriptors),
    Fault("server: wall clock jumps by -32 to +1 years", _clock_jumps, "clock"),
    Fault("server: 20 slow readers", _slow_readers),
    Fault("server: 40 half-open connections", _half_open),
    Fault("store on disk: disk full", _full_disk, "disk"),
    Fault("store on disk: disk read-only", _read_only_disk, "disk"),
    Fault("store on Redis: kill -9", _redis_killed, "redis"),
    Fault("store on Redis: stopped for 1 s", _redis_stopped(_STOP), "redis"),
    Fault("store on Redis: hangs for 8 s", _redis_stopped(_HANG), "redis"),
    *(
        fault
        for role in ("prefill", "decode", "mixed")
        for fault in (
            Fault(f"{role} worker: kill -9", _kill(role), "cluster", may_lose=_AT_ONCE),
            Fault(f"{role} worker: stopped for 1 s", _stop(role, _STOP), "cluster"),
            Fault(f"{role} worker: hangs for 8 s", _stop(role, _HANG), "cluster", may_lose=_AT_ONCE),
        )
    ),
    Fault("router: kill -9", _kill("router"), "cluster", may_lose=2 * _AT_ONCE),
    Fault("router: kill -9 under 200 streams", _kill("router"), "cluster", at_once=200, may_lose=400),
    Fault("router: stopped for 1 s", _stop("router", _STOP), "cluster"),
    Fault("router: hangs for 8 s", _stop("router", _HANG), "cluster"),
)


def judge(fault: Fault, count: Count) -> list[str]:
    """Say what is not as promised."""
    said = [*count.wrong[:3], *count.leaked]
    if count.lost.total() > fault.may_lose * count.tried:
        said.append(f"{count.lost.total()} requests lost, {fault.may_lose * count.tried} are promised: {count.lost}")
    return said


def table(rows: Sequence[tuple[Fault, Count]]) -> str:
    """Return the Markdown table."""
    lines = ["| fault | tried | requests | lost | wrong | leaked | longest stall |", "|---|--:|--:|--:|--:|--:|--:|"]
    for fault, count in rows:
        why = "" if not count.lost else f" ({', '.join(f'{n} {what}' for what, n in sorted(count.lost.items()))})"
        lines.append(
            f"| {fault.name} | {count.tried} | {count.requests} | {count.lost.total()}{why} | {len(count.wrong)} "
            f"| {len(count.leaked)} | {count.stall:.1f} s |"
        )
    return "\n".join(lines)


def write(page: Path, name: str, text: str) -> None:
    """Put a table between its marks in a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}{text}\n{end}{rest.partition(end)[2]}")


def main() -> int:
    """Try the faults that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names of faults")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    given = parser.parse_args()
    rows, wrong = [], 0
    for fault in FAULTS:
        if given.names and not fault.name.startswith(tuple(given.names)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            count = asyncio.run(try_fault(fault, Path(folder), given.times))
        rows.append((fault, count))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        for line in judge(fault, count):
            print(f"  NOT HELD: {line}", flush=True)
            wrong += 1
    if given.write:
        write(Path(__file__).parents[2] / "docs" / "reliability.md", "faults", table(rows))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
