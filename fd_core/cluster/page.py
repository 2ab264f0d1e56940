"""Status of a deployment, without secrets: /health, /ready, /metrics and /status.json at a separate port."""

from __future__ import annotations

import socket
from typing import Annotated, Any, Final

import msgspec
from multidict import CIMultiDict
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

import fd_core
from fd_core.cluster.controller import ProcessPhase
from fd_core.cluster.deployment import ROUTERS, Deployment
from fd_core.config import ListenConfig
from fd_core.http.connections.connections import Connections
from fd_core.http.errors import ApiError, HealthAnswer
from fd_core.http.hosts import HostRules
from fd_core.http.metrics import Collected, metric_families
from fd_core.router.gateway.http1.clients import ClientRequest, GatewayHttp, WholeAnswer, error_answer, json_answer
from fd_core.types.metrics import counter, gauge

_CONNECTIONS: Final = 64


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process, as /status.json shows it."""

    name: str
    phase: str
    ready: bool
    node: str
    url: str
    seconds: float
    """Time in its phase."""


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One group, as /status.json and /metrics show it."""

    role: str
    target: Annotated[int, gauge("target", "Target number of processes.")]
    minimum: int
    maximum: int
    ready: Annotated[int, gauge("ready", "Processes that are ready.")]
    starting: Annotated[int, gauge("starting", "Processes that are not ready yet.")]
    leaving: Annotated[int, gauge("leaving", "Processes that are draining, or were killed.")]
    running: Annotated[int, gauge("requests_running", "Requests in slots of ready workers.")]
    waiting: Annotated[int, gauge("requests_waiting", "Requests that wait for a slot of a ready worker.")]
    kv_usage: Annotated[float, gauge("kv_usage_ratio", "Share of KV blocks that are not free, 0 to 1.")]
    ttft_seconds: Annotated[
        float | None, gauge("ttft_seconds", "90th percentile of the time to the first token over half a minute.")
    ]
    starts: Annotated[int, counter("starts", "Processes that were started.")]
    deaths: Annotated[int, counter("deaths", "Processes that ended unexpectedly.")]
    given_up: Annotated[int, gauge("given_up", "1 if no process starts any more, 0 otherwise.")]
    reason: str
    processes: tuple[ProcessStatus, ...]


class DeploymentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A whole deployment, as /status.json shows it."""

    version: str
    model: str
    launcher: str
    not_ready: str | None
    groups: dict[str, GroupStatus]


def status_of(deployment: Deployment, now: float) -> DeploymentStatus:
    """Return the current status."""
    config = deployment.config
    roles = {ROUTERS: "router", **{name: group.role for name, group in config.worker_groups.items()}}
    return DeploymentStatus(
        version=fd_core.__version__,
        model=config.model,
        launcher=config.launcher,
        not_ready=_not_ready(deployment),
        groups={name: _group(deployment, name, role, now=now) for name, role in roles.items()},
    )


class DeploymentPage:
    """HTTP endpoint of one deployment while it runs."""

    def __init__(self, deployment: Deployment, now: Any, sock: socket.socket) -> None:
        """`now` returns a monotonic clock. Raises `OSError` if the address of `sock` is in use."""
        config = ListenConfig(host=deployment.config.host, port=deployment.config.port)
        self._deployment = deployment
        self._now = now
        self._hosts = HostRules(config.host, (), ())
        self._process = ProcessCollector(registry=CollectorRegistry())
        self._http = GatewayHttp(self._answer, sock, Connections(config, _CONNECTIONS))

    async def close(self) -> None:
        """Close the listener."""
        await self._http.close(0.1)

    async def _answer(self, request: ClientRequest) -> WholeAnswer:
        try:
            self._hosts.check(request.visit())
            if request.method not in ("GET", "HEAD"):
                raise ApiError(405, "this path only supports GET", headers={"Allow": "GET, HEAD"})
            return self._page(request.path)
        except ApiError as error:
            return error_answer(error, request.path)

    def _page(self, path: str) -> WholeAnswer:
        if path == "/health":
            return json_answer(HealthAnswer("ok"))
        if path == "/ready":
            reason = _not_ready(self._deployment)
            return json_answer(HealthAnswer("not ready", reason), 503) if reason else json_answer(HealthAnswer("ok"))
        status = status_of(self._deployment, self._now())
        if path == "/status.json":
            return json_answer(status)
        if path == "/metrics":
            parts = [({"group": name, "role": group.role}, group) for name, group in status.groups.items()]
            body = generate_latest(Collected(metric_families("fdcore_cluster_", parts), self._process.collect()))
            return WholeAnswer(200, body, CIMultiDict({"Content-Type": CONTENT_TYPE_LATEST}))
        raise ApiError(404, "unknown path; available are /health, /ready, /metrics and /status.json")


def _not_ready(deployment: Deployment) -> str | None:
    controller = deployment.controller
    if controller.stopping:
        return "the deployment is shutting down"
    for name, group in controller.groups.items():
        if (ready := controller.ready(name)) < group.plan.minimum:
            why = f": {group.given_up}" if group.given_up else ""
            return f"{ready} of at least {group.plan.minimum} processes of {name} are ready{why}"
    return None


def _group(deployment: Deployment, name: str, role: str, now: float) -> GroupStatus:
    controller, doing = deployment.controller, deployment.load(name)
    group = controller.groups[name]
    members = [(each, deployment.held.get(each.name)) for each in controller.of_group(name)]
    phases = [each.phase for each, _ in members]
    return GroupStatus(
        role=role,
        target=group.target,
        minimum=group.plan.minimum,
        maximum=group.plan.maximum,
        ready=controller.ready(name),
        starting=phases.count(ProcessPhase.STARTING),
        leaving=phases.count(ProcessPhase.DRAINING) + phases.count(ProcessPhase.KILLED),
        running=doing.running,
        waiting=doing.waiting,
        kv_usage=doing.kv_usage,
        ttft_seconds=None if name == ROUTERS else deployment.load_of(name).ttft_seconds,
        starts=group.starts,
        deaths=group.deaths,
        given_up=int(bool(group.given_up)),
        reason=group.given_up,
        processes=tuple(
            ProcessStatus(
                name=each.name,
                phase=each.phase.value,
                ready=each.ready,
                node=held.node if held else "",
                url=held.url if held else "",
                seconds=round(now - each.since, 1),
            )
            for each, held in members
        ),
    )
