"""A whole deployment under one virtual clock: clients, routers and workers. Nothing in it depends on the machine."""

from __future__ import annotations

import hashlib
import math
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from fd_core.disagg.prefill.sender import Sender
from fd_core.effects.port import CompletionQueue, JoinedEffectPort
from fd_core.engine.building.kv_offload import kept_kv
from fd_core.kv.prefix import PrefixHasher
from fd_core.ops.contract import KVCache
from fd_core.plugins import ROUTER_POLICY, Plugins
from fd_core.router.config import RouterConfig
from fd_core.router.router import Router
from fd_core.router.selection import RouteRequest
from fd_core.simulation.clients import SimulatedClient
from fd_core.simulation.clock.timeline import LocalTimeline, Network, Timeline
from fd_core.simulation.clock.virtual_loop import VirtualThreads
from fd_core.simulation.clock.waits import WaitAccount
from fd_core.simulation.engines.device import PlanComputer, ScriptedComputer
from fd_core.simulation.engines.engine import (
    EngineParts,
    OutsideParts,
    SimulatedEngineClient,
    SimulatedPool,
    SimulatedWorker,
)
from fd_core.simulation.gateway import SimulatedGateway
from fd_core.simulation.results.summary import Absence, RequestOutcome, Run, WorkerSample
from fd_core.simulation.storage.storage import SharedStore, TransferNetwork, simulated_storage, simulated_transfer
from fd_core.simulation.workloads.conversations import Conversation, Piece
from fd_core.types import Delta, FinishReason, RequestSpec, StepPlan
from fd_core.types.kv_events import KVEvent
from fd_core.types.metrics import read_metrics

_MAX_SAMPLES: Final = 20_000
"""Samples of workers that are kept; beyond, every second one is dropped and the sampling rate is halved."""


class RunIncomplete(RuntimeError):
    """Requests have not ended by the deadline of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDeployment:
    """A simulated deployment, without the load."""

    label: str
    groups: tuple[SimulatedPool, ...]
    routers: int = 1
    """Gateways that clients use in turn; 0 is for a single worker that clients connect to directly."""
    router: RouterConfig = field(default_factory=RouterConfig)
    store: Callable[[Timeline], SharedStore] | None = None
    """Creates the KV store of all workers; None has none."""
    latency: float = 0.0002
    """Seconds of any message from one endpoint to another."""
    relay: float = 0.0
    """Processor seconds of routers and clients for each part of an answer, where they run on the first worker's
    processor; 0 where they have others."""
    crowding: tuple[float, float] | None = None
    """Slowdown factors of a step that only decodes, and of any other step, while another worker computes, where
    workers share memory and caches; None if each has a separate machine."""
    sample_seconds: float = 1.0
    """Time between two samples of the workers; grows in long runs."""
    check: bool = True
    """True to compare every answer, token by token, with the expected one."""
    audit: bool = False
    """True to audit every engine after every turn."""


class World:
    """One run: create it, run the clients, read the results. Equal arguments give equal runs, byte for byte."""

    def __init__(self, deployment: SimulatedDeployment, plugins: Plugins, seed: int = 0) -> None:
        """`seed` decides every random choice of routers and the secret of prefix names."""
        self.timeline = Timeline()
        self.network = Network(self.timeline, deployment.latency)
        self.transfers = self._make_transfers()
        self.store = None if deployment.store is None else deployment.store(self.timeline)
        self.deployment = deployment
        self.seed = seed
        self.outcomes: list[RequestOutcome] = []
        self.samples: list[WorkerSample] = []
        self.clients: dict[str, SimulatedClient] = {}
        """Conversations in progress, by name."""
        self.on_event: Callable[[], None] = lambda: None
        """Called after each outcome, to show progress."""
        self._plugins = plugins
        self._counters: defaultdict[str, float] = defaultdict(float)
        """Counters of ended engines, by metric."""
        self._waits = array("f")
        """Time of each outcome's request by reason, see `Run.waits`."""
        self._absences: list[Absence] = []
        self._states: dict[int, tuple[str, float]] = {}
        """State of each worker, `up`, `restarts` or `away`, and its start."""
        self._accounts: dict[str, WaitAccount] = {}
        self._answers: dict[str, Piece] = {}
        self._every = deployment.sample_seconds
        self._groups = [group for group in deployment.groups for _ in range(group.count)]
        """Pool of each worker."""
        self.workers = [
            SimulatedWorker(LocalTimeline(self.timeline), index, group, make_parts=partial(self._parts, group))
            for index, group in enumerate(self._groups)
        ]
        draw = random.Random(f"fd_core/{seed}")  # noqa: S311  # no secret
        self.gateways = [
            SimulatedGateway(
                self.timeline,
                f"router{number}",
                partial(self._make_router, f"router{number}"),
                workers=self.workers,
                network=self.network,
                draw=random.Random(draw.random()),  # noqa: S311  # no secret
            )
            for number in range(deployment.routers)
        ]
        if not self.gateways and len(self.workers) != 1:
            raise ValueError(f"{len(self.workers)} workers need a router")
        self._coming: Iterator[Conversation] = iter(())
        self._more_to_come = False
        for worker in self.workers:
            worker.on_start = partial(self._started, worker)
            if deployment.relay:
                worker.on_answer = self._relay
            if worker.client is not None:
                self._started(worker, worker.client)

    @property
    def busy(self) -> bool:
        """True if a client is not done, or has yet to arrive."""
        return self._more_to_come or bool(self.clients)

    def run(self, conversations: Iterable[Conversation], until: float = math.inf) -> Run:
        """Run the clients of `conversations`, which are in order of time; return the results.

        Raises `RunIncomplete` if requests are left at time `until`, `WrongAnswer` for an unexpected token, and the
        errors of engines and routers: none of them may happen in a healthy world.
        """
        began = time.perf_counter()
        self._coming, self._more_to_come = iter(conversations), True
        self._next_client()
        self._sample()
        if self.gateways:
            self.timeline.after(self.deployment.router.health_check_interval_secs, self._check)
        self.timeline.run(until)
        if self.busy:
            names = ", ".join(list(self.clients)[:4])
            raise RunIncomplete(
                f"{len(self.clients)} conversations have not ended after {until:g} s, among them {names}"
            )
        return self._result(time.perf_counter() - began)

    def ask(self, spec: RequestSpec, asked: RouteRequest, client: SimulatedClient) -> None:
        """Send a client's request to a router, or to the only worker."""
        name = spec.request_id
        self._answers[name] = client.answer
        self._accounts[name] = client.account
        gateway, worker = None, self.workers[0]
        if self.gateways:  # a conversation always uses the same one
            digest = hashlib.blake2b(client.conversation.name.encode(), digest_size=4).digest()
            gateway = self.gateways[int.from_bytes(digest) % len(self.gateways)]

        def arrive() -> None:
            if client.gone:
                return
            if gateway is None:
                client.tried()
                worker.take(spec, _Direct(client))
            else:
                gateway.ask(spec, asked, client)

        self.network.send("clients", worker.name if gateway is None else gateway.name, arrive)

    def leave(self, request_id: str) -> None:
        """Send the end of a connection."""
        if not self.gateways:
            worker = self.workers[0]
            self.network.send("clients", worker.name, partial(worker.leave, request_id))
        for gateway in self.gateways:
            self.network.send("clients", gateway.name, partial(gateway.leave, request_id))

    def _make_transfers(self) -> TransferNetwork:
        return TransferNetwork(self.network)

    def _make_router(self, _name: str) -> Router:
        """Return a router with empty state, for the gateway of this name."""
        return Router(self.deployment.router, partial(self._plugins.load, ROUTER_POLICY))

    def _parts(self, group: SimulatedPool, name: str, process: int) -> EngineParts:
        config, limits = group.config, group.limits
        hasher = None
        if config.enable_prefix_caching:
            # Workers of one deployment share a store's secret, and so the names of prefixes.
            secret = hashlib.blake2b(f"fd_core/{self.seed}".encode()).digest()
            hasher = PrefixHasher(block_size=limits.block_size, identity="simulated", secret=secret)

        trace = None if config.trace is None else Path(config.trace)
        if trace is not None and sum(each.count for each in self.deployment.groups) > 1:
            trace = trace.with_name(f"{trace.stem}-{name}{trace.suffix}")

        def computer() -> PlanComputer:
            if group.computer is not None:
                return group.computer(limits, self._answers.get)
            return ScriptedComputer(limits, self._answers.get, group.acceptance)

        return EngineParts(
            pool=group,
            plugins=self._plugins,
            computer=computer,
            outside=partial(self._outside, group, name),
            hasher=hasher,
            trace=trace,
            account_of=self._accounts.get,
            beside=None if self.deployment.crowding is None else partial(self._beside, name, *self.deployment.crowding),
            check=self.deployment.audit,
        )

    def _outside(
        self, group: SimulatedPool, endpoint: str, timeline: Timeline, queue: CompletionQueue, cache: KVCache
    ) -> OutsideParts:
        """Return the tiers and pairs that `config` requests, with the deployment's store for `config.kv_store`."""
        config, costs, threads = group.config, group.costs, VirtualThreads(timeline)
        keep, offload = None, None
        if group.block_bytes is not None and config.enable_prefix_caching:
            keep = kept_kv(config, stored=self.store is not None)
            if keep is not None:
                offload = simulated_storage(
                    threads,
                    queue,
                    cache,
                    costs=costs,
                    block_bytes=group.block_bytes,
                    host_bytes=config.host_kv_memory,
                    store=self.store,
                    load_seconds=config.kv_store_timeout,
                )
        transfer = simulated_transfer(threads, queue, cache, costs, self.transfers, endpoint, config, group.limits)
        kv_port = transfer.port if isinstance(transfer, Sender) else None
        return OutsideParts(JoinedEffectPort(queue, offload, transfer), keep, kv_port, threads.kill, threads.share)

    def _started(self, worker: SimulatedWorker, client: SimulatedEngineClient) -> None:
        client.on_over = partial(self._count, client)
        client.on_state = partial(self._note_state, worker)
        self._note_state(worker)
        if not client.info.kv_events:
            return

        def tell(_: Sequence[KVEvent]) -> None:
            for gateway in self.gateways:
                self.network.send(worker.name, gateway.name, partial(gateway.learn, worker))

        client.on_kv_events = tell

    def _note_state(self, worker: SimulatedWorker) -> None:
        """Record the state of a worker, and the absence that is over."""
        client = worker.client
        state = "away" if client is None else "up" if client.alive else "restarts" if client.restarts else "away"
        before, since = self._states.get(worker.index, (state, self.timeline.now))
        if before not in ("up", state) and since < self.timeline.now:
            self._absences.append(Absence(worker.index, since, self.timeline.now, restarts=before == "restarts"))
        if before != state or worker.index not in self._states:
            self._states[worker.index] = state, self.timeline.now

    def _beside(self, name: str, decoding: float, computing: float, plan: StepPlan) -> float:
        others = (worker.client for worker in self.workers if worker.name != name)
        if not any(client is not None and client.alive and client.device.computing for client in others):
            return 1.0
        return decoding if plan.total_tokens == len(plan.slots) else computing

    def _relay(self) -> None:
        if (first := self.workers[0].client) is not None:
            first.device.run_on_step_cpu(self.deployment.relay)

    def _next_client(self) -> None:
        """Schedule the next client for its time; those after it are not created before."""
        conversation = next(self._coming, None)
        if conversation is None:
            self._more_to_come = False
            return
        if conversation.at < self.timeline.now - 1e-9:
            raise ValueError(f"the conversation {conversation.name} is out of order: it comes at {conversation.at:g} s")
        self.timeline.at(conversation.at, lambda: self._come(conversation))

    def _come(self, conversation: Conversation) -> None:
        self._next_client()
        if conversation.name in self.clients:
            raise ValueError(f"there are two conversations named {conversation.name}")
        limits = self._groups[0].limits
        client = self.clients[conversation.name] = SimulatedClient(
            self.timeline,
            conversation,
            ask=self.ask,
            leave=self.leave,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            delay=self._groups[0].costs.delivery() + (2 if self.gateways else 1) * self.network.latency,
            ended=self._ended,
            done=lambda client: self.clients.pop(client.conversation.name),
            check=self.deployment.check,
        )
        client.next_request()

    def _ended(self, outcome: RequestOutcome) -> None:
        self._answers.pop(outcome.request_id, None)
        for seconds in self._accounts.pop(outcome.request_id).end():
            self._waits.extend(seconds)
        self.outcomes.append(outcome)
        self.on_event()

    def _check(self) -> None:
        if not self.busy:
            return
        for gateway in self.gateways:
            gateway.check()
        self.timeline.after(self.deployment.router.health_check_interval_secs, self._check)

    def _sample(self) -> None:
        """Sample every worker, now and every `sample_seconds`, as long as there is a client."""
        if not self.busy:
            return
        for worker in self.workers:
            counts = (0, 0, 0, 0)
            if worker.client is not None and worker.client.alive:
                held = worker.client.engine.holdings()
                counts = (held.waiting, held.running + held.loading, held.owned, held.cached)
            self.samples.append(WorkerSample(self.timeline.now, worker.index, *counts))
        if len(self.samples) > max(_MAX_SAMPLES, 64 * len(self.workers)):
            count = len(self.workers)
            rounds = [self.samples[at : at + count] for at in range(0, len(self.samples), 2 * count)]
            self.samples = [sample for kept in rounds for sample in kept]
            self._every *= 2
        self.timeline.after(self._every, self._sample)

    def _count(self, client: SimulatedEngineClient) -> None:
        """Add the counters of an engine, which then ends or is not read again."""
        for spec, samples in read_metrics(client.engine.stats().scheduler):
            if spec.kind == "counter":
                self._counters[spec.name] += sum(value for _, value in samples)
        self._counters["device_busy_seconds"] += client.device.busy_seconds

    def _result(self, wall_seconds: float) -> Run:
        for worker in self.workers:
            if worker.client is not None and worker.client.alive:
                self._count(worker.client)
                worker.client.end_trace()
        first = min((outcome.arrived for outcome in self.outcomes), default=0.0)
        last = max((outcome.ended for outcome in self.outcomes), default=0.0)
        for index, (state, since) in sorted(self._states.items()):
            if state != "up" and since < last:
                self._absences.append(Absence(index, since, last, restarts=state == "restarts"))
        profiles = dict.fromkeys(group.profile for group in self.deployment.groups)
        return Run(
            label=self.deployment.label,
            seed=self.seed,
            seconds=last - first,
            wall_seconds=wall_seconds,
            workers=tuple(worker.name for worker in self.workers),
            blocks=tuple(group.limits.num_kv_blocks for group in self._groups),
            outcomes=tuple(self.outcomes),
            samples=tuple(self.samples),
            counters=dict(sorted(self._counters.items())),
            waits=self._waits.tobytes(),
            absences=tuple(self._absences),
            profile="; ".join(profiles),
        )


class _Direct:
    """A client of a worker without a router in between."""

    def __init__(self, client: SimulatedClient) -> None:
        self._client = client

    def answered(self, delta: Delta) -> None:
        if delta.finish_reason is FinishReason.ERROR:
            self._client.broken(500, delta.error or "the engine failed")
        else:
            self._client.read(delta, 0)

    def refused(self, status: int, reason: str) -> None:
        self._client.broken(status, reason)

    def lost(self, reason: str) -> None:
        self._client.broken(502, reason)
