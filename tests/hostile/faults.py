"""Faults of real processes under load, and the tables of docs/operate/reliability.md.

    python -m tests.hostile.faults [--rounds N] [--write] [NAME ...]

Clients behave like OpenAI's clients: they retry refused connections and 503; everything else is counted. A fault proves
that it took effect, and a request may be lost only if the stopped or killed process was handling it.
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
from typing import Any, Final, Literal

import aiohttp

from tests.hostile.page import PAGE, replace
from tests.server.processes import GAUGES, free_port
from tests.soak.cluster import Cluster, Node, cluster_of
from tests.soak.watching import at_rest

__all__ = ["FAULTS", "Count", "Fault", "Interruption", "NotTried", "Scene", "counted", "judge", "table", "try_fault"]

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
_SPARE_DESCRIPTORS: Final = 8
_PATIENCE: Final = 60.0
"""Seconds for operations that take one or two on an idle machine."""
_UNDER_WAY_SECONDS: Final = 1.0
"""Seconds in which output that a worker wrote before its end may still pass through the router."""
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
"""Imported by every Python process that is started: shifts its wall clock by the offset in a file."""


@dataclass(slots=True)
class Count:
    """Results of the requests of one fault."""

    tried: int = 0
    requests: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """Error that the client received for each request that ended without its text."""
    in_hand: int = 0
    """Number of requests that the killed or stopped processes were handling."""
    needless: list[str] = field(default_factory=list)
    """Losses of requests that none of these processes was handling."""
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    stall: float = 0.0


class NotTried(AssertionError):
    """The fault had no effect, so the round proves nothing."""


Loses = Literal["nothing", "sent", "started"]
"""Requests that a process takes with it: none, those sent to it, or those whose text had started to arrive."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """Interval from the signal that ended or stopped a process until it could accept no more requests."""

    begin: float
    end: float

    def excuses(self, since: float | None, until: float) -> bool:
        """Return True if losing a request at `until` is expected, given that the process has held it since `since`."""
        return since is not None and since <= self.end and until >= self.begin


@dataclass(slots=True)
class _Flight:
    """A request in flight."""

    sent: float
    begun: float | None = None


@dataclass(slots=True)
class Scene:
    """Target of a fault: one server, or a router and its workers."""

    front: Node
    workers: list[Node]
    session: aiohttp.ClientSession
    cluster: Cluster | None = None
    clock: Path | None = None
    store: Any = None
    count: Count = field(default_factory=Count)
    golden: dict[str, str] = field(default_factory=dict)
    """Text by prompt."""
    flights: list[_Flight] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    losses: list[tuple[str, float | None, float]] = field(default_factory=list)
    """Lost requests: the error, the time from which a process held it, and the time of the loss."""

    @property
    def server(self) -> Node:
        return self.workers[0]

    @property
    def engine(self) -> int:
        return self.server.engine()

    def of(self, role: str) -> Node:
        return next(worker for worker in self.workers if worker.role == role)

    async def metrics(self, node: Node) -> dict[str, float]:
        return await Cluster(self.front, self.workers, self.session).metrics(node)

    async def busy(self, streams: int = 4) -> None:
        """Wait until that many streams run."""
        async with asyncio.timeout(_PATIENCE):
            while sum(flight.begun is not None for flight in self.flights) < streams:
                await asyncio.sleep(0.002)

    async def wait_recovered(self) -> None:
        """Wait until all requests are served again."""
        if self.cluster is not None:
            await self.cluster.wait_ready(*self.workers)
            return
        async with asyncio.timeout(2 * _PATIENCE):
            while True:
                process = self.server.process
                assert process is not None
                assert process.poll() is None, f"the server exited unexpectedly:\n{self.server.log_text()}"
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with self.session.get(f"{self.server.url}/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)


Does = Callable[[Scene, "Fault"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table."""

    name: str
    does: Does
    target: str = "server"
    """`server`, `cluster`, `clock`, or the kind of its store: `disk`, `redis`."""
    at_once: int = _AT_ONCE
    loses: Loses = "nothing"
    serve: Sequence[str] = ()
    """Options in addition to those of every server."""


async def _ask(scene: Scene, fault: Fault, prompt: str) -> None:
    count, flight = scene.count, _Flight(time.monotonic())
    count.requests += 1
    since, text, done = flight.sent, "", False
    body = {"prompt": prompt, "max_tokens": _TOKENS, "seed": 7, "temperature": 1.0, "stream": True, "ignore_eos": True}
    body["cache_salt"] = str(flight.sent)  # no prefix hits: prefill workers and stores get work

    def observe_progress() -> None:
        nonlocal since
        now = time.monotonic()
        count.stall, since = max(count.stall, now - since), now

    def lost(what: str) -> None:
        count.lost[what] += 1
        had = {"nothing": None, "sent": flight.sent, "started": flight.begun}[fault.loses]
        scene.losses.append((f"{what} for {prompt[:30]!r}, held by no process that ended", had, time.monotonic()))

    scene.flights.append(flight)
    try:
        while True:
            flight.sent = time.monotonic()
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
                lost(f"status {answer.status}")
                return
            async for line in answer.content:
                observe_progress()
                if flight.begun is None:
                    flight.begun = since
                data = line.strip().removeprefix(b"data: ")
                if line.startswith(b"data: ") and data == b"[DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    event = json.loads(data)
                    if "error" in event:
                        lost(f"error event {event['error']['code']}")
                        break
                    text += "".join(choice["text"] for choice in event["choices"])
            else:
                if not done:
                    count.wrong.append(f"the stream of {prompt!r} ended without [DONE] or an error")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        lost(f"connection {type(error).__name__}")
    finally:
        scene.flights.remove(flight)
    golden = scene.golden
    whole = golden.setdefault(prompt, text) if done else golden.get(prompt, text)
    if text != whole if done else not whole.startswith(text.rstrip("\ufffd")):
        count.wrong.append(f"{text[:60]!r} instead of {whole[:60]!r}")


async def try_fault(fault: Fault, folder: Path, rounds: int = 1) -> Count:
    """Apply a fault repeatedly to processes under load, and count the results of the requests.

    Raises `NotTried` if the fault has no effect.
    """
    stop = asyncio.Event()
    async with _scene(fault, folder) as scene:
        for prompt in _PROMPTS:
            await _ask(scene, fault, prompt)
        assert len(scene.golden) == len(_PROMPTS), f"requests are lost without a fault: {scene.count}"
        await _wait_idle(scene)
        count = scene.count = Count()
        before = {node.name: node.usage().descriptors for node in scene.workers}

        async def load(number: int) -> None:
            while not stop.is_set():
                await _ask(scene, fault, _PROMPTS[number % len(_PROMPTS)])
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
            for _ in range(rounds):
                await scene.busy(fault.at_once // 2)
                await fault.does(scene, fault)
                await scene.wait_recovered()
                count.tried += 1
            await asyncio.sleep(0.3)
            stop.set()
            async with asyncio.timeout(2 * _PATIENCE):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        for what, since, until in scene.losses:
            if not any(interruption.excuses(since, until) for interruption in scene.interruptions):
                count.needless.append(what)
        try:
            await _wait_idle(scene)
        except AssertionError as error:
            count.leaked.append(str(error))
        ends, grown = time.monotonic() + _PATIENCE, before
        while grown and time.monotonic() < ends:  # idle connections between workers are closed
            await asyncio.sleep(0.2)
            after = {node.name: node.usage().descriptors for node in scene.workers}
            grown = {name: now for name, now in after.items() if now > before[name] + _SPARE_DESCRIPTORS}
        count.leaked += [f"descriptors of {name}: {before[name]} became {now}" for name, now in grown.items()]
    return count


async def _wait_idle(scene: Scene) -> None:
    """Wait until no resources are held for requests and only our connections are open."""
    if scene.cluster is not None:
        await at_rest(scene.cluster, _PATIENCE)
        return
    ends = time.monotonic() + _PATIENCE
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
    timeout = aiohttp.ClientTimeout(total=4 * _PATIENCE)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        contextlib.AsyncExitStack() as on,
    ):
        if fault.target == "cluster":
            made = cluster_of(
                folder, _ROLES, serve=(*_NULL, "--num-kv-blocks", "4000"), pair=("--lease-seconds", "2"), route=_ROUTE
            )
            cluster = await on.enter_async_context(made)
            yield Scene(cluster.router, cluster.workers, session, cluster)
            return
        options, store, clock = [*_SERVE, *fault.serve], None, None
        if fault.target in ("disk", "redis"):
            store = on.enter_context(_redis() if fault.target == "redis" else _volume(folder / "kv"))
            location = f"disk:{store}" if fault.target == "disk" else f"redis+unix://{store.socket}"
            secret = folder / "secret"
            secret.write_text("secret shared by the engines of this test")
            secret.chmod(0o600)
            options += ["--kv-store", location, "--kv-store-secret-file", str(secret), "--host-kv-memory", "1024"]
        if fault.target == "clock":
            clock = folder / "clock"
            (folder / "sitecustomize.py").write_text(_CLOCK)
            on.enter_context(_environment(PYTHONPATH=str(folder), FD_CLOCK=str(clock)))
        port = free_port()
        node = Node("server", "mixed", port, ["serve", *options], folder / "server.log")
        node.start()
        try:
            scene = Scene(node, [node], session, clock=clock, store=store)
            await scene.wait_recovered()
            yield scene
            await node.leave()
            assert "Traceback" not in node.log_text(), node.log_text()
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
    """A small in-memory file system."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700,size=8m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _kill_engine(kind: signal.Signals, seconds: float) -> Does:
    async def does(scene: Scene, _: Fault) -> None:
        epoch = (await scene.metrics(scene.server))["engine_epoch"]
        pid = scene.engine
        os.kill(pid, kind)
        if seconds:
            await _standing_still(pid)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            return
        await _another_engine(scene, epoch)

    return does


async def _another_engine(scene: Scene, epoch: float, seconds: float = _PATIENCE) -> None:
    try:
        async with asyncio.timeout(seconds):
            while (await scene.metrics(scene.server))["engine_epoch"] == epoch:
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise NotTried(f"the engine still runs after {seconds:g} s:\n{scene.server.log_text()}") from None


async def _standing_still(pid: int) -> None:
    """Wait until a process that received SIGSTOP is stopped."""
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
            await asyncio.sleep(0.01)


async def _engine_out_of_memory(scene: Scene, fault: Fault) -> None:
    """Forbid the engine process further memory, then send requests that need some."""
    epoch, pid = (await scene.metrics(scene.server))["engine_epoch"], scene.engine
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):  # RLIMIT_DATA covers memory that is reserved but unused
        resource.prlimit(pid, kind, (1 << 20, resource.prlimit(pid, kind)[1]))
    large = [asyncio.create_task(_ask(scene, fault, f"{number:3} " * 1900)) for number in range(200)]
    try:
        await _another_engine(scene, epoch)
        await asyncio.gather(*large)
        # This engine has free memory to reuse, which would spare it the next time.
        await _kill_engine(signal.SIGKILL, 0)(scene, fault)
    finally:
        for each in large:
            each.cancel()


def _kill(who: str) -> Does:
    async def does(scene: Scene, _: Fault) -> None:
        node = scene.front if who == "router" else scene.of(who)
        if node is not scene.front:
            scene.count.in_hand += await _in_hand(scene, node)
        begin, lost = time.monotonic(), scene.count.lost.total()
        await node.kill()
        await asyncio.sleep(0.2)
        if node is scene.front:
            held = sum(flight.sent <= node.killed for flight in scene.flights)
            scene.count.in_hand += held + scene.count.lost.total() - lost
            scene.interruptions.append(Interruption(begin, node.killed))
        else:
            scene.interruptions.append(Interruption(begin, node.killed + _UNDER_WAY_SECONDS))
        node.start()

    return does


def _stop(who: str, seconds: float) -> Does:
    async def does(scene: Scene, _: Fault) -> None:
        node = scene.front if who == "router" else scene.of(who)
        if node is not scene.front:
            scene.count.in_hand += await _in_hand(scene, node)
        begin = time.monotonic()
        node.send_all(signal.SIGSTOP)
        await _standing_still(node.pid)
        scene.interruptions.append(Interruption(begin, time.monotonic() + _UNDER_WAY_SECONDS))
        await asyncio.sleep(seconds)
        node.send_all(signal.SIGCONT)

    return does


async def _in_hand(scene: Scene, worker: Node) -> int:
    """Wait until a worker of the router is busy, and return its number of requests."""
    sign = "kv_sent_blocks_total" if worker.role == "prefill" else "active_requests"
    before = _sum(await scene.metrics(worker), sign) if worker.role == "prefill" else 0.0
    async with asyncio.timeout(_PATIENCE):
        while True:
            # The worker gets no new requests while they are counted.
            scene.front.send_all(signal.SIGSTOP)
            try:
                await _standing_still(scene.front.pid)
                metrics = await scene.metrics(worker)
            finally:
                scene.front.send_all(signal.SIGCONT)
            if _sum(metrics, sign) > before:
                return int(metrics["active_requests"])
            await asyncio.sleep(0.05)


async def _no_descriptors(scene: Scene, _: Fault) -> None:
    """Leave the server three more file descriptors, then open 40 connections."""
    pid, before = scene.server.pid, (await scene.metrics(scene.server))["accept_errors_total"]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    top = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (top + 3, hard))
    idle = [socket.create_connection(("127.0.0.1", scene.server.port)) for _ in range(40)]
    await asyncio.sleep(2)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    for one in idle:
        one.close()
    await counted(scene, "accept_errors_total", before, 1)


async def counted(
    scene: Scene, name: str | tuple[str, ...], before: float, more: int, seconds: float = _PATIENCE
) -> None:
    """Wait until a counter of the server has grown by that much."""
    ends = time.monotonic() + seconds
    while (now := _sum(await scene.metrics(scene.server), name)) < before + more:
        if time.monotonic() > ends:
            raise NotTried(f"{name} went from {before:g} to {now:g}, expected an increase of at least {more}")
        await asyncio.sleep(0.1)


def _sum(metrics: dict[str, float], name: str | tuple[str, ...]) -> float:
    """Add up the samples whose names have this prefix."""
    return sum(value for sample, value in metrics.items() if sample.startswith(name))


async def _clock_jumps(scene: Scene, _: Fault) -> None:
    assert scene.clock is not None
    for seconds in (-3600, 86_400 * 400, 0, -(10**9), 3):
        scene.clock.write_text(str(seconds))
        request = {"prompt": "x", "max_tokens": 1}
        async with scene.session.post(f"{scene.server.url}/v1/completions", json=request) as answer:
            offset = (await answer.json())["created"] - time.time()
        if abs(offset - seconds) > 30:
            raise NotTried(f"the child's clock is off by {offset:.0f} s and not by {seconds}")
        await asyncio.sleep(0.5)


async def _slow_readers(scene: Scene, _: Fault) -> None:
    """Twenty clients that request one or eight streams and read nothing, or a few bytes a second."""
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(_connection(scene, 1024)) for _ in range(20)]
        for number, reader in enumerate(readers):
            request = {
                "prompt": "slow",
                "max_tokens": 390,
                "stream": True,
                "ignore_eos": True,
                "n": (8, 1, 1, 1)[number % 4],
            }
            ask = json.dumps(request).encode()  # all fit at once, so none waits in the queue
            reader.sendall(_head(len(ask)) + ask)
        ends = time.monotonic() + 2.0
        while time.monotonic() < ends:
            await asyncio.sleep(0.1)
            for reader in readers[::2]:
                with contextlib.suppress(OSError):
                    reader.recv(16)
        ends = time.monotonic() + _PATIENCE
        while (full := _unsent(scene.server.port)) < len(readers):
            if time.monotonic() > ends:
                raise NotTried(f"only {full} of {len(readers)} connections are full")
            await asyncio.sleep(0.1)


def _unsent(port: int) -> int:
    """Return the number of connections of a port with unsent bytes."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(line[1].rpartition(":")[2], 16) == port and int(line[4].partition(":")[0], 16) > 0 for line in lines)


async def _half_open(scene: Scene, _: Fault) -> None:
    """Vanish after sending nothing, half a head, half a body or a whole request."""
    before = _sum(await scene.metrics(scene.server), "connections_closed_total")
    with contextlib.ExitStack() as stack:
        body = json.dumps({"prompt": "gone", "max_tokens": 300, "stream": True, "ignore_eos": True}).encode()
        for number in range(40):
            one = stack.enter_context(_connection(scene, 1024))
            whole = _head(len(body)) + body
            one.sendall((b"", whole[:30], whole[:-20], whole)[number % 4])
            if number % 8 == 7:
                # TCP_REPAIR: the socket vanishes without a FIN or RST.
                with contextlib.suppress(PermissionError):
                    one.setsockopt(socket.IPPROTO_TCP, 19, 1)
                one.close()
        await counted(scene, "connections_closed_total", before, 30)


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


_FAILS: Final = ("kv_store_failures_total",)
_WORKS: Final = (*_FAILS, "kv_store_dropped_blocks_total", "kv_store_written_blocks_total", "kv_loads_total")


def _store(does: Callable[[Scene], Awaitable[None]], shows: tuple[str, ...]) -> Does:
    """Apply a fault to the store while the engine uses it; one of the counters `shows` has to grow."""

    async def met(scene: Scene, _: Fault) -> None:
        before = _sum(await scene.metrics(scene.server), shows)
        await does(scene)
        await counted(scene, shows, before, 1)

    return met


async def _full_disk(scene: Scene) -> None:
    filler = scene.store / "filler"
    before = _sum(await scene.metrics(scene.server), _WORKS)
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while file.write(bytes(1 << 16)):
            file.flush()
    await asyncio.sleep(1.5)
    await counted(scene, _WORKS, before, 1)
    filler.unlink()


async def _read_only_disk(scene: Scene) -> None:
    before = _sum(await scene.metrics(scene.server), _FAILS)
    for mode in ("ro", "rw"):
        subprocess.run(["mount", "-o", f"remount,{mode}", scene.store], check=True)
        await asyncio.sleep(1.5)
        await counted(scene, _FAILS, before, 1)


async def _redis_killed(scene: Scene) -> None:
    before = _sum(await scene.metrics(scene.server), _FAILS)
    await asyncio.to_thread(scene.store.kill)
    await asyncio.sleep(1.0)
    await counted(scene, _FAILS, before, 1)
    await asyncio.to_thread(scene.store.start)


def _redis_stopped(seconds: float) -> Callable[[Scene], Awaitable[None]]:
    async def does(scene: Scene) -> None:
        with scene.store.frozen():
            await _standing_still(scene.store.pid)
            await asyncio.sleep(seconds)

    return does


_STOP, _HANG = 1.0, 8.0
_LARGE: Final = ("--max-model-len", "8192", "--num-kv-blocks", "100000")
_ROLES_LOSE: Final[dict[str, Loses]] = {"prefill": "nothing", "decode": "started", "mixed": "started"}
FAULTS: Final = (
    Fault("engine: kill -9", _kill_engine(signal.SIGKILL, 0)),
    Fault("engine: stopped for 1 s", _kill_engine(signal.SIGSTOP, _STOP)),
    Fault("engine: hangs", _kill_engine(signal.SIGSTOP, 0)),
    Fault("engine: out of memory", _engine_out_of_memory, serve=_LARGE),
    Fault("server: kill -9", _kill("mixed"), loses="sent"),
    Fault("server: stopped for 1 s", _stop("mixed", _STOP)),
    Fault("server: descriptors exhausted, 40 connections", _no_descriptors),
    Fault("server: wall clock jumps by -32 to +1 years", _clock_jumps, "clock"),
    Fault("server: 20 slow readers of 55 streams", _slow_readers, serve=_LARGE),
    Fault("server: 40 half-open connections", _half_open),
    Fault("store on disk: disk full", _store(_full_disk, _WORKS), "disk"),
    Fault("store on disk: disk read-only", _store(_read_only_disk, _FAILS), "disk"),
    Fault("store on Redis: kill -9", _store(_redis_killed, _FAILS), "redis"),
    Fault("store on Redis: stopped for 1 s", _store(_redis_stopped(_STOP), _WORKS), "redis"),
    Fault("store on Redis: hangs for 8 s", _store(_redis_stopped(_HANG), _FAILS), "redis"),
    *(
        fault
        for role, loses in _ROLES_LOSE.items()
        for fault in (
            Fault(f"{role} worker: kill -9", _kill(role), "cluster", loses=loses),
            Fault(f"{role} worker: stopped for 1 s", _stop(role, _STOP), "cluster"),
            Fault(f"{role} worker: hangs for 8 s", _stop(role, _HANG), "cluster", loses=loses),
        )
    ),
    Fault("router: kill -9", _kill("router"), "cluster", loses="sent"),
    Fault("router: kill -9 under 200 streams", _kill("router"), "cluster", at_once=200, loses="sent"),
    Fault("router: stopped for 1 s", _stop("router", _STOP), "cluster"),
    Fault("router: hangs for 8 s", _stop("router", _HANG), "cluster"),
)


def judge(fault: Fault, count: Count) -> list[str]:
    """Return the violated promises."""
    violations = [*count.wrong[:3], *count.leaked, *count.needless[:3]]
    if count.lost.total() > count.in_hand:
        violations.append(f"{count.lost.total()} requests lost, {count.in_hand} were in flight: {count.lost}")
    if not count.tried:
        violations.append("not tried")
    return violations


def table(rows: Sequence[tuple[Fault, Count]]) -> str:
    """Return the Markdown table."""
    lines = ["| fault | tried | requests | lost | wrong | leaked | longest stall |", "|---|--:|--:|--:|--:|--:|--:|"]
    for fault, count in rows:
        errors = ", ".join(f"{times} {what}" for what, times in sorted(count.lost.items()))
        why = f" of {count.in_hand} in hand ({errors})" if errors else ""
        lines.append(
            f"| {fault.name} | {count.tried} | {count.requests} | {count.lost.total()}{why} | {len(count.wrong)} "
            f"| {len(count.leaked)} | {count.stall:.1f} s |"
        )
    return "\n".join(lines)


def merged(text: str, made: str) -> str:
    """Return a page with the rows of `made`; faults without a new result keep their rows."""
    old = replace(text, "faults", made)[1]
    head = made.splitlines()[:2]
    rows = {line.split(" | ")[0]: line for line in (*old.splitlines(), *made.splitlines())}
    lines = [rows[f"| {fault.name}"] for fault in FAULTS if f"| {fault.name}" in rows]
    return replace(text, "faults", "\n".join((*head, *lines)))[0]


def main() -> int:
    """Run the named faults, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="prefixes of fault names")
    parser.add_argument("--rounds", type=int, default=1, help="how often to apply each fault to the same processes")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/operate/reliability.md")
    given = parser.parse_args()
    rows, wrong = [], 0
    for fault in FAULTS:
        if given.names and not fault.name.startswith(tuple(given.names)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                count = asyncio.run(try_fault(fault, Path(folder), given.rounds))
            except NotTried as error:
                count = Count(needless=[str(error)])
        rows.append((fault, count))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        for line in judge(fault, count):
            print(f"  NOT HELD: {line}", flush=True)
            wrong += 1
    if given.write:
        PAGE.write_text(merged(PAGE.read_text(), table(rows)))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
