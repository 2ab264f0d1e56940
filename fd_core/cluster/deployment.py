"""A running deployment: polls its processes over HTTP, lets the controller decide, and executes its actions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from fd_core.cluster import controller
from fd_core.cluster.config import ClusterConfig, ClusterSecrets, WorkerGroup, router_spec, worker_spec
from fd_core.cluster.scaling import GroupLoad, ScalingPolicy, quantile
from fd_core.errors import FdError
from fd_core.launching.contract import NODE_LOST, LaunchedProcess, Launcher, LaunchError
from fd_core.router.workers import Role

_TIMEOUT: Final = aiohttp.ClientTimeout(total=5, connect=3)
_SHARE: Final = 0.9
_REREGISTER_SECONDS: Final = 10.0
"""Interval between registrations of one worker, in seconds; they change nothing unless the router lost it."""


class _Slots(msgspec.Struct):
    running: int = 0
    loading: int = 0
    waiting: int = 0


class _BlockCounts(msgspec.Struct):
    used: int = 0
    fenced: int = 0
    total: int = 0


class _SchedulerReport(msgspec.Struct):
    slots: _Slots = msgspec.field(default_factory=_Slots)
    blocks: _BlockCounts = msgspec.field(default_factory=_BlockCounts)


class _StatsReport(msgspec.Struct):
    scheduler: _SchedulerReport = msgspec.field(default_factory=_SchedulerReport)


class _EngineReport(msgspec.Struct):
    max_num_seqs: int = 0


class _HistogramReport(msgspec.Struct):
    bounds: list[float] = []
    counts: list[int] = []


class _SecondsReport(msgspec.Struct):
    time_to_first_token: _HistogramReport = msgspec.field(default_factory=_HistogramReport)


class _StatusPage(msgspec.Struct):
    not_ready: str | None = None
    engine: _EngineReport = msgspec.field(default_factory=_EngineReport)
    stats: _StatsReport = msgspec.field(default_factory=_StatsReport)
    seconds: _SecondsReport = msgspec.field(default_factory=_SecondsReport)


_status: Final = msgspec.json.Decoder(_StatusPage)


@dataclass(slots=True)
class FirstTokens:
    """Histogram of a worker's times to the first token over the last half minute."""

    bounds: Sequence[float] = ()
    _read: deque[tuple[float, Sequence[int]]] = field(default_factory=deque)

    def add(self, now: float, bounds: Sequence[float], counts: Sequence[int]) -> None:
        """Add a sample of the histogram."""
        if self._read and (tuple(bounds) != self.bounds or sum(counts) < sum(self._read[-1][1])):
            self._read.clear()  # another process
        self.bounds = tuple(bounds)
        self._read.append((now, counts))
        while len(self._read) > 2 and now - self._read[1][0] > 30.0:
            self._read.popleft()

    @property
    def counts(self) -> list[int]:
        """Return the number of requests with a first token within each bound in that time."""
        first, last = (self._read[0][1], self._read[-1][1]) if self._read else ((), ())
        return [after - before for before, after in zip(first, last, strict=True)]


class ObservedLoad(NamedTuple):
    """Load of a worker at one moment."""

    running: int = 0
    waiting: int = 0
    slots: int = 0
    blocks_used: int = 0
    blocks: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks that are not free."""
        return self.blocks_used / self.blocks if self.blocks else 0.0


def late_first_token(workers: Iterable[FirstTokens]) -> float | None:
    """Return the 90th percentile of the time to the first token, in seconds; None without requests."""
    read = [each for each in workers if each.bounds]
    same = [each.counts for each in read if each.bounds == read[0].bounds]
    return quantile(_SHARE, read[0].bounds, [sum(column) for column in zip(*same, strict=True)]) if read else None


@dataclass(frozen=True, slots=True)
class ProcessAnswer:
    """Response of a process to a poll."""

    healthy: bool = False
    ready: bool = False
    instance: str = ""
    """Identifies the process and its engine; empty for a router."""
    load: ObservedLoad = field(default_factory=ObservedLoad)


async def ask(session: aiohttp.ClientSession, url: str, first: FirstTokens | None, now: float) -> ProcessAnswer:
    """Poll a worker, or a router if there are no times to `first` tokens. Never raises for its responses."""
    try:
        async with session.get(f"{url}/health", timeout=_TIMEOUT, allow_redirects=False) as answer:
            healthy, instance = answer.status == 200, answer.headers.get("X-Instance", "")
        if first is None:
            return ProcessAnswer(healthy, healthy)
        async with session.get(f"{url}/status.json", timeout=_TIMEOUT, allow_redirects=False) as answer:
            page = _status.decode(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, ValueError):
        return ProcessAnswer()
    slots, blocks, read = page.stats.scheduler.slots, page.stats.scheduler.blocks, page.seconds.time_to_first_token
    first.add(now, read.bounds, read.counts)
    running, used = slots.running + slots.loading, blocks.used + blocks.fenced
    load = ObservedLoad(running, slots.waiting, page.engine.max_num_seqs, blocks_used=used, blocks=blocks.total)
    return ProcessAnswer(healthy, healthy and page.not_ready is None, instance, load=load)


class RouterAdmin:
    """Registers workers with one router, through the admin port that it announced."""

    def __init__(self, session: aiohttp.ClientSession, url: str, secret: str) -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._one_at_a_time = asyncio.Lock()
        self._registered: dict[str, tuple[str, float]] = {}
        """Workers' addresses to the registered instance and the time of registration."""

    async def register(self, url: str, role: Role, instance: str, now: float, serves: Callable[[], bool]) -> str:
        """Register a worker that still `serves`, unless registered recently; return the error, if any."""
        async with self._one_at_a_time:
            registered, at = self._registered.get(url, ("", 0.0))
            if not serves() or (registered == instance and now - at < _REREGISTER_SECONDS):
                return ""
            trouble = await self._post("register", {"url": url, "role": role, "instance": instance})
            if not trouble:
                self._registered[url] = instance, now
            return trouble

    async def deregister(self, url: str) -> None:
        """Stop it from sending further requests to a worker."""
        async with self._one_at_a_time:
            if self._registered.pop(url, None) is not None:
                await self._post("deregister", {"url": url})

    async def _post(self, what: str, body: dict[str, str]) -> str:
        try:
            async with self._session.post(
                f"{self._url}/{what}", json=body, headers=self._headers, timeout=_TIMEOUT, allow_redirects=False
            ) as answer:
                return "" if answer.status == 200 else f"HTTP status {answer.status}: {(await answer.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__


log = logging.getLogger(__name__)

ROUTERS: Final = "router"
_ASK_SECONDS: Final = 0.5
_GRACE_SECONDS: Final = 15.0
"""Grace period after the drain timeout, in seconds."""


class ClusterFailed(FdError):
    """A deployment could not be started; its running processes were ended."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class ProcessHandle:
    """State of one process, from the order to start it until its end."""

    name: str
    group: str
    port: int = 0
    """Port of a router, from the file; 0 for any."""
    first: FirstTokens | None = None
    """Histogram of a worker; None for a router."""
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    process: LaunchedProcess | None = None
    url: str = ""
    admin: RouterAdmin | None = None
    answer: ProcessAnswer = field(default_factory=ProcessAnswer)
    end: controller.ProcessEnd | None = None

    @property
    def node(self) -> str:
        """Node of the process; empty before it runs."""
        return "" if self.process is None else self.process.node


def plans_of(config: ClusterConfig) -> tuple[controller.GroupPlan, ...]:
    """Return the groups of a deployment, routers first."""
    count = config.router_group.count
    workers = (controller.GroupPlan(name, *group.bounds) for name, group in config.worker_groups.items())
    return (controller.GroupPlan(ROUTERS, count, count, is_router=True), *workers)


class Deployment:
    """Manages every process of one deployment."""

    def __init__(
        self,
        config: ClusterConfig,
        launcher: Launcher,
        policies: Mapping[str, ScalingPolicy],
        variables: Mapping[str, str],
        on_note: Callable[[controller.ClusterNote], None] = lambda note: None,
    ) -> None:
        """`policies` are those of the groups with a variable number of workers; `variables` contain the secrets."""
        self.config = config
        limits = controller.Supervision(
            start_seconds=config.start_seconds,
            unhealthy_seconds=config.unhealthy_seconds,
            drain_seconds=config.drain_delay + config.drain_seconds + _GRACE_SECONDS,
            max_failures=config.max_failures,
        )
        self.controller = controller.ClusterController.of(plans_of(config), limits)
        self.held: dict[str, ProcessHandle] = {}
        self._groups: Mapping[str, WorkerGroup] = config.worker_groups
        self._launcher = launcher
        self._policies = policies
        self._variables = variables
        self._on_note = on_note
        self._secrets = ClusterSecrets()
        self._logged_errors: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        # Starts may block until resources are free and occupy all threads; polling must not wait for them.
        self._poll_executor = ThreadPoolExecutor(1, "fdcore-look")
        self._registering: asyncio.Task[None] | None = None
        self._next_scaling = 0.0

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Serve until `stop`, then drain and end every process; `on_ready` is called once the groups are ready."""
        announced, hurried = False, False
        try:
            async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
                self._session = session
                while not self.controller.over:
                    now = time.monotonic()
                    actions = self.controller.step(now, await self._poll())
                    if stop.is_set() and not self.controller.stopping:
                        actions += self.controller.stop(now)
                    if hurry.is_set() and not hurried:
                        hurried = True
                        actions += self.controller.stop(now)
                    self._perform(actions)
                    if not self.controller.stopping:
                        self._scale(now)
                        if self._registering is None or self._registering.done():
                            self._registering = self._spawn(self._register())
                    if not announced and self.controller.complete and await self._serves():
                        announced = True
                        on_ready()
                    await asyncio.sleep(0.25)
                if self._tasks:  # operations that have begun complete
                    await asyncio.wait(self._tasks, timeout=1)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.get_running_loop().run_in_executor(self._poll_executor, self._launcher.close)
            self._poll_executor.shutdown()

    @property
    def urls(self) -> list[str]:
        """URLs of the routers."""
        return [each.url for each in self.held.values() if each.group == ROUTERS and each.url]

    def load(self, group: str) -> ObservedLoad:
        """Return the total load of the ready workers of a group."""
        return ObservedLoad(*map(sum, zip(*(each.answer.load for each in self.ready(group)), strict=True)))

    def load_of(self, name: str) -> GroupLoad:
        """Return the load of a group for its scaling policy."""
        load, group = self.load(name), self._groups[name]
        role = "decode" if group.role == "prefill" else group.role
        felt = [other for other, each in self._groups.items() if each.role == role and role == "decode"] or [name]
        first = (each.first for other in felt for each in self.ready(other))
        return GroupLoad(
            role=group.role,  # type: ignore[arg-type]  # the file was checked
            target=self.controller.groups[name].target,
            ready=self.controller.ready(name),
            running=load.running,
            waiting=load.waiting,
            slots=load.slots,
            kv_usage=load.kv_usage,
            ttft_seconds=late_first_token(each for each in first if each is not None),
        )

    def ready(self, group: str) -> list[ProcessHandle]:
        """Return the processes of a group that are ready and not draining."""
        return [self.held[each.name] for each in self.controller.of_group(group) if self._is_serving(each.name)]

    def _is_serving(self, name: str) -> bool:
        process = self.controller.processes.get(name)
        return process is not None and process.phase is controller.ProcessPhase.READY and bool(self.held[name].url)

    async def _poll(self) -> dict[str, controller.ObservedProcess]:
        await asyncio.get_running_loop().run_in_executor(self._poll_executor, self._read_ends)
        seen = {}
        for held in list(self.held.values()):
            seen[held.name] = controller.ObservedProcess(held.answer.ready, held.answer.healthy, held.end)
            if held.end is not None:
                del self.held[held.name]
                self._spawn(self._forget(held))
        return seen

    def _read_ends(self) -> None:
        """Query the launcher, which may take a while."""
        for held in list(self.held.values()):
            process = held.process
            if process is not None and held.end is None and (code := process.exit_code()) is not None:
                held.end = controller.ProcessEnd(
                    code, _in_one_line(process.reason(), exited=code in range(1, NODE_LOST))
                )

    def _perform(self, actions: Iterable[controller.ClusterAction]) -> None:
        for action in actions:
            match action:
                case controller.StartProcess(name, group):
                    port = self._free_port() if group == ROUTERS else 0
                    held = ProcessHandle(name, group, port, first=None if group == ROUTERS else FirstTokens())
                    self.held[name] = held
                    self._spawn(self._launch(held))
                case controller.DrainProcess(name):
                    self._spawn(self._drain(self.held[name]))
                case controller.KillProcess(name):
                    self._spawn(self._kill(self.held[name]))
                case controller.ClusterNote():
                    (log.warning if action.bad else log.info)("%s", action.text)
                    self._on_note(action)

    async def _launch(self, held: ProcessHandle) -> None:
        try:
            if held.group == ROUTERS:
                spec = router_spec(held.name, self.config, held.port, own=self._secrets, variables=self._variables)
            else:
                spec = worker_spec(held.name, self.config, held.group, own=self._secrets, variables=self._variables)
            launched = await asyncio.to_thread(self._launcher.start, [spec])
        except Exception as error:  # noqa: BLE001  # any exception of a plugin's launcher: the process does not run
            reason = str(error) if isinstance(error, LaunchError) else f"{type(error).__name__}: {error}"
            held.end = controller.ProcessEnd(None, reason, placed=False)
            return
        finally:
            held.launched.set()
        held.process = launched[0]
        while held.end is None:
            if not held.url:
                self._read_announcement(held, held.process)
            if held.url:
                held.answer = await ask(self._session, held.url, held.first, now=time.monotonic())
            await asyncio.sleep(_ASK_SECONDS)

    def _read_announcement(self, held: ProcessHandle, process: LaunchedProcess) -> None:
        addresses = (process.announced() or "").split()
        if not addresses:
            return
        # A process that listens on all addresses does not know the one that others connect to.
        url, *admin = (each.replace("//localhost:", f"//{process.address}:") for each in addresses)
        held.url = url
        if held.group == ROUTERS and admin:
            held.admin = RouterAdmin(self._session, admin[0], self._secrets.router)

    def _free_port(self) -> int:
        router = self.config.router_group
        taken = {each.port for each in self.held.values()}
        ports = range(router.port, router.port + router.count) if router.port else ()
        return next((port for port in ports if port not in taken), 0)

    async def _drain(self, held: ProcessHandle) -> None:
        await held.launched.wait()
        if held.process is not None:
            await self._forget(held)
            held.process.terminate()

    async def _kill(self, held: ProcessHandle) -> None:
        await held.launched.wait()
        if held.process is not None:
            held.process.kill()
            await self._forget(held)

    async def _forget(self, held: ProcessHandle) -> None:
        """Deregister a worker from every router; a router that does not respond detects the loss by itself."""
        if held.first is not None and held.url:
            await asyncio.gather(*(admin.deregister(held.url) for _, admin in self._admins()))

    def _admins(self) -> list[tuple[str, RouterAdmin]]:
        return [(each.name, each.admin) for each in self.held.values() if each.admin is not None]

    async def _register(self) -> None:
        now = time.monotonic()
        for router, admin in self._admins():
            for name, group in self._groups.items():
                for held in self.ready(name):
                    trouble = await admin.register(
                        held.url,
                        group.role,  # type: ignore[arg-type]  # the file was checked
                        held.answer.instance,
                        now,
                        lambda name=held.name: self._is_serving(name),  # type: ignore[misc]  # bound now
                    )
                    if (
                        trouble
                        and (message := f"registering {held.name} with {router} failed: {trouble}")
                        not in self._logged_errors
                    ):
                        self._logged_errors.add(message)
                        log.warning("%s", message)

    def _scale(self, now: float) -> None:
        if now < self._next_scaling or not self.controller.complete:
            return
        self._next_scaling = now + 1.0
        for name, policy in self._policies.items():
            self._perform(self.controller.scale(name, policy.propose(self.load_of(name), now)))

    async def _serves(self) -> bool:
        for held in self.held.values():
            if held.group != ROUTERS:
                continue
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self._session.get(f"{held.url}/ready", timeout=aiohttp.ClientTimeout(total=3)) as answer:
                    if answer.status == 200:
                        continue
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s", type(error).__name__, error)


def _in_one_line(reason: str, *, exited: bool) -> str:
    """Return how a process ended, with its last output if it `exited` by itself."""
    how, *lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["ended"]
    return f"{how}; last output: {lines[-1]}" if exited and lines else how
