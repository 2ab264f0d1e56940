"""The launcher `ray`: one actor per process, in placement groups. Ray places and supervises processes, but transports
no tokens."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from fd_core.errors import PluginError
from fd_core.launching.contract import NODE_LOST, Launcher, LaunchError, Node, ProcessSpec, require_startable

_PLACE_SECONDS: Final = 60.0
"""Time to wait for CPUs and devices, which Ray releases some time after the exit of a process."""
_START_SECONDS: Final = 120.0
_END_SECONDS: Final = 5.0
_VERDICT_SECONDS: Final = 5.0
"""Time for Ray to report the loss of a node after that of an actor; afterwards only the actor is considered lost."""
_POLL_SECONDS: Final = 0.1
_CALLS: Final = 4
"""Concurrent calls of an actor: two wait for its process."""


class RayProcess:
    """A process owned by a Ray actor."""

    def __init__(self, ray: Any, spec: ProcessSpec, actor: Any, group: PlacedGroup) -> None:
        self.name, self.spec = spec.name, spec
        self.node = self.address = ""
        self.pid = 0
        """PID on its node."""
        self._ray, self._actor, self._group = ray, actor, group
        self._started = actor.start.remote(spec)
        self._announcement = self._end = None
        self._ended: tuple[int, str] | None = None
        self._missed: float | None = None
        """Time at which its actor stopped responding."""
        self._lock = threading.Lock()

    def require_started(self) -> None:
        """Wait until it runs. Raises `LaunchError`."""
        try:
            self.node, self.address, self.pid = self._ray.get(self._started, timeout=_START_SECONDS)
        except Exception as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise LaunchError(f"{self.name} cannot be started: {text[-1]}") from error
        self._announcement = self._actor.announcement.remote()
        self._end = self._actor.end.remote()

    def announced(self) -> str | None:
        """Return its announced address, None until then."""
        if not self._is_there(self._announcement, 0.0):
            return None
        with contextlib.suppress(self._ray.exceptions.RayError):
            announced: str | None = self._ray.get(self._announcement)
            return announced
        return None

    def exit_code(self) -> int | None:
        """Return None while it runs, then its exit code, or `NODE_LOST`."""
        return self.wait(0.0)

    def reason(self) -> str:
        """Return its exit reason and last output lines; empty while it runs."""
        self.exit_code()
        return self._ended[1] if self._ended else ""

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._actor.terminate.remote()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._actor.kill.remote()

    def wait(self, seconds: float) -> int | None:
        """Wait for its exit. Its resources are released once this or `exit_code` has seen it."""
        deadline = time.monotonic() + seconds
        while self._ended is None and self._is_there(self._end, max(0.0, deadline - time.monotonic())):
            with self._lock:
                if self._ended is None and (ended := self._how()) is not None:
                    self._ended = ended
                    self.release()
            if self._ended is None:
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_SECONDS)
        return self._ended[0] if self._ended else None

    def release(self) -> None:
        """Kill the actor; reserved resources are released when the whole group has ended."""
        self._ended = self._ended or (NODE_LOST, "was abandoned")
        self._ray.kill(self._actor)
        self._group.left(self)

    def _is_there(self, reference: Any, seconds: float) -> bool:
        if not self._ray.is_initialized():  # it would start a cluster
            return False
        return bool(self._ray.wait([reference], timeout=seconds, fetch_local=False)[0])

    def _how(self) -> tuple[int, str] | None:
        """Return the exit reason; None while it is unknown whether its actor or its node is lost."""
        try:
            ended: tuple[int, str] = self._ray.get(self._end)
        except self._ray.exceptions.RayError as error:
            where = f"node {self.address} ({self.node})"
            self._missed = self._missed or time.monotonic()
            if any(each["NodeID"] == self.node and each["Alive"] for each in self._ray.nodes()):
                if time.monotonic() < self._missed + _VERDICT_SECONDS:
                    return None
                return NODE_LOST, f"was lost with its actor on {where}: {str(error).splitlines()[0]}"
            return NODE_LOST, f"was lost with its {where}"
        return ended


class PlacedGroup:
    """A placement group and the processes in it."""

    def __init__(self, ray: Any, specs: Sequence[ProcessSpec]) -> None:
        """Request the group; the specs are those of one group."""
        self._ray = ray
        self.specs = tuple(specs)
        self.processes: list[RayProcess] = []
        # A bundle must not be empty, and every node has memory.
        bundles = [
            {kind: count for kind, count in (("CPU", spec.cores), ("GPU", spec.devices)) if count} or {"memory": 1}
            for spec in specs
        ]
        strategy = "SPREAD" if any(spec.spread for spec in specs) else "PACK"
        self._placement = ray.util.placement_group(bundles, strategy=strategy)

    def require_placed(self) -> None:
        """Wait until it is placed. Raises `LaunchError`."""
        if not self._placement.wait(_PLACE_SECONDS):
            free = self._ray.available_resources()
            raise lacking(self.specs, f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} devices are free")

    def start(self, actor: Any) -> list[RayProcess]:
        """Start its processes."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for index, spec in enumerate(self.specs):
            options = actor.options(
                num_cpus=spec.cores,
                num_gpus=spec.devices,
                max_concurrency=_CALLS,
                scheduling_strategy=strategy(self._placement, placement_group_bundle_index=index),
            )
            self.processes.append(RayProcess(self._ray, spec, options.remote(), group=self))
        return self.processes

    def left(self, process: RayProcess) -> None:
        """Record the exit of a process."""
        self.processes = [each for each in self.processes if each is not process]
        if not self.processes:
            self.remove()

    def remove(self) -> None:
        """Release its resources, even if processes still run there. Idempotent."""
        self._ray.util.remove_placement_group(self._placement)


class RayLauncher(Launcher):
    """Launches processes on the cluster at `RAY_ADDRESS`, by default the cluster of this machine."""

    def __init__(self) -> None:
        """Connect. Raises `PluginError` without Ray, and `LaunchError` without a cluster."""
        if importlib.util.find_spec("ray") is None:
            raise PluginError(
                "the launcher ray needs Ray, which is not installed",
                field="--distributed-executor-backend",
                hint="pip install 'ray>=2.9', on every node",
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        import ray.util.scheduling_strategies

        from fd_launcher_ray.agent import Agent

        self._ray = ray
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level=logging.WARNING)
            except (ConnectionError, ValueError, RuntimeError) as error:
                first = next(iter(str(error).splitlines()), type(error).__name__)
                raise LaunchError(
                    f"there is no Ray cluster to connect to: {first}",
                    field="RAY_ADDRESS",
                    hint="start one with `ray start --head`, and this command on one of its nodes",
                ) from error
        self._agent = ray.remote(Agent)
        self._lock = threading.Lock()
        self._running: list[RayProcess] = []

    @property
    def here(self) -> str:
        """Node id of this process's Ray connection."""
        node: str = self._ray.get_runtime_context().get_node_id()
        return node

    def start(self, specs: Sequence[ProcessSpec]) -> tuple[RayProcess, ...]:
        """Start all processes or none, with one placement group per group."""
        with self._lock:
            self._running = [process for process in self._running if process.exit_code() is None]
            require_startable(specs, [process.name for process in self._running])
            self._require_possible(specs)
            members: dict[str, list[ProcessSpec]] = {}
            for spec in specs:
                members.setdefault(f"group {spec.group}" if spec.group else f"process {spec.name}", []).append(spec)
            groups: list[PlacedGroup] = []
            try:
                groups += [PlacedGroup(self._ray, each) for each in members.values()]
                for group in groups:
                    group.require_placed()
                started = {process.name: process for group in groups for process in group.start(self._agent)}
                for process in started.values():
                    process.require_started()
            except BaseException:
                for group in groups:
                    group.remove()  # which ends its actors
                raise
            self._running += started.values()
        return tuple(started[spec.name] for spec in specs)

    def _require_possible(self, specs: Sequence[ProcessSpec]) -> None:
        """Raise `LaunchError` if nodes have too few resources that no running process of this launcher has.

        Ray would wait for nodes to be added. Only what ended processes and other users release is worth waiting for.
        """
        alive, there = [node for node in self.nodes() if node.alive], list[str]()
        running = [each.spec for each in self._running if each.node in {node.id for node in alive}]
        for kind, unit in (("cores", "CPUs"), ("devices", "devices")):
            has = [getattr(node, kind) for node in alive]
            free = sum(has) - sum(getattr(spec, kind) for spec in running)
            needed = [getattr(spec, kind) for spec in specs]
            if sum(needed) > free or max(needed, default=0) > max(has, default=0):
                there.append(f"{free} {unit} of nodes with up to {max(has, default=0)} are free")
        if there:
            raise lacking(specs, " and ".join(there))

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes of the cluster."""
        return tuple(
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 0)),
                devices=int(node["Resources"].get("GPU", 0)),
                alive=node["Alive"],
            )
            for node in self._ray.nodes()
        )

    def close(self) -> None:
        """Kill all running processes, and disconnect from the cluster."""
        with self._lock:
            running, self._running = self._running, []
            if not self._ray.is_initialized():
                return
            for process in running:
                process.kill()
            for process in running:
                if process.wait(_END_SECONDS) is None:
                    process.release()
            if self._connected:
                self._ray.shutdown()


def lacking(specs: Sequence[ProcessSpec], there: str) -> LaunchError:
    """Return the error for a request that exceeds the available resources."""
    names = ", ".join(spec.name for spec in specs)
    cores, devices = sum(spec.cores for spec in specs), sum(spec.devices for spec in specs)
    return LaunchError(f"{names} need {cores} CPUs and {devices} devices, but {there}")
