"""Runs one hostile world and checks the invariants."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import takewhile

import msgspec
import numpy as np

from fd_core.config import Limits
from fd_core.effects.port import CompletionQueue
from fd_core.engine.core import Engine
from fd_core.engine.loaded_adapters import EngineAdapters
from fd_core.errors import BadRequest
from fd_core.ops.contract import KVCache
from fd_core.plugins import ROUTER_POLICY, Plugins, installed_plugins
from fd_core.router.prefix_index import HashedPrompt, block_hasher
from fd_core.router.router import Router
from fd_core.router.selection import RouteRequest
from fd_core.router.workers import RouterWorker
from fd_core.simulation.clients import SimulatedClient
from fd_core.simulation.clock.timeline import Timeline
from fd_core.simulation.engines.device import AnswerOf, PlanComputer
from fd_core.simulation.engines.engine import (
    EngineParts,
    OutsideParts,
    SimulatedEngineClient,
    SimulatedPool,
    SimulatedWorker,
    WorkerCaller,
)
from fd_core.simulation.faults import apply, over_at
from fd_core.simulation.gateway import SimulatedGateway
from fd_core.simulation.results.summary import RequestOutcome, Run
from fd_core.simulation.storage.storage import SharedStore
from fd_core.simulation.world import SimulatedDeployment, World
from fd_core.types import Delta, RequestSpec
from tests.simulation.helpers import require_complete_waits
from tests.simulation.hostile.accidents import Poison, PoisonedComputer, schedule_accident
from tests.simulation.hostile.computing import ADAPTERS, AuditedComputer, BrokenLaw, Foreseeing, Oracle, null_runner
from tests.simulation.hostile.epochs import WatchedEpochs
from tests.simulation.hostile.leases import EngineWatch, LeaseWatch, WatchedCache, WatchedPort
from tests.simulation.hostile.plans import BLOCK_BYTES, HostilePlan, QuickCosts
from tests.simulation.hostile.routing import Disguise, WatchedRouter
from tests.simulation.hostile.transfers import HARMLESS_HABITS, HostileTransfers, Stranger, forged_ticket

__all__ = ["HARMLESS", "HostileWorld", "run_plan"]

BOUND = 60.0
"""Seconds from the last fault to the end of the last request."""
SETTLE = 40.0
"""Seconds after which no state of any request may be left."""
HARMLESS = frozenset(
    {
        *("device_slow", "clock_wrong", "network_slow", "clients_leave", "transfers_repeated"),
        *("store_down", "store_slow", "store_full", "store_loses", "store_damages"),
    }
)
"""Faults that must not fail a request."""


class HostileWorld(World):
    """World with the tokens of the null model, in which everything is checked."""

    def __init__(self, plan: HostilePlan, log: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self.oracle = Oracle(plan.limits.vocab_size, plan.limits.max_model_len)
        self.submitted: dict[str, RequestSpec] = {}
        """All requests, by id."""
        self.sent_to: defaultdict[str, list[str]] = defaultdict(list)
        """Workers to which each request was sent."""
        self.revoked: set[str] = set()
        """Requests preempted before their end."""
        self.epochs: dict[str, WatchedEpochs] = {}
        """Client of the current or last process of each worker."""
        self.sick: set[str] = set()
        """Workers whose rows fail."""
        self.disguise = Disguise(plan.anonymous, {f"http://{name}:8000": role for name, role in plan.misnamed.items()})
        self.log = log
        kinds = {fault.kind for fault in plan.faults}
        self.watch = LeaseWatch(
            strict=not kinds & {"clock_wrong", "process_stands_still"},
            gentle=kinds <= {"clients_leave", "transfers_repeated"}
            and plan.pairs.habit in HARMLESS_HABITS
            and plan.harmless,
            tokens_of=lambda target, request: self._delivered[target, request],
            engine_of=self._engine_of,
        )
        self._delivered: Counter[tuple[str, str]] = Counter()
        """Tokens that a request received from its latest worker."""
        costs = QuickCosts(plan.token_seconds, plan.copy_seconds)
        groups = tuple(
            SimulatedPool(
                config=config,
                limits=plan.limits,
                costs=costs,
                profile="made up",
                max_queued_requests=plan.max_queued_requests,
                restart_seconds=0.3,
                computer=partial(self._computer, name),
                block_bytes=BLOCK_BYTES if plan.tiers else None,
            )
            for name, config in zip(plan.worker_names, plan.each_config, strict=True)
        )
        deployment = SimulatedDeployment(
            label=f"hostile world {plan.seed}",
            groups=groups,
            routers=plan.routers,
            router=plan.router,
            store=SharedStore if plan.stored else None,
            latency=plan.latency,
            sample_seconds=1000.0,
            audit=True,
        )
        super().__init__(deployment, _plugins(), plan.seed)
        self.on_event = self._check_routers
        for worker in self.workers:
            worker.take = partial(self._take, worker, worker.take)  # type: ignore[method-assign]
            worker.leave = partial(self._on_disconnect, worker, worker.leave)  # type: ignore[method-assign]

    def ask(self, spec: RequestSpec, submitted: RouteRequest, client: SimulatedClient) -> None:
        """Submit with the salt and the sampling parameters of the plan, and record the reference output."""
        name = client.conversation.name
        params = msgspec.structs.replace(self.plan.params[name], max_tokens=spec.params.max_tokens)
        params = msgspec.structs.replace(params, min_tokens=min(params.min_tokens, params.max_tokens))
        salt = self.plan.salts[name]
        adapter = self.plan.adapters.get(name, "")
        spec = msgspec.structs.replace(spec, params=params, cache_salt=salt, adapter=adapter)
        self.submitted[spec.request_id] = spec
        client.wanted = None
        if len(spec.prompt) < self.plan.limits.max_model_len:
            client.wanted = self.oracle.answer(spec)
        self.log_event(
            f"{spec.request_id} sends {len(spec.prompt)} tokens, at most {params.max_tokens}, salt {salt!r} {adapter}"
        )
        super().ask(spec, msgspec.structs.replace(submitted, salt=salt, model=adapter or None), client)

    def leave(self, request_id: str) -> None:
        self.log_event(f"{request_id} disconnects")
        super().leave(request_id)

    def log_event(self, what: str) -> None:
        """Log an event if tracing is on."""
        if self.log is not None:
            self.log(f"{self.timeline.now:9.4f}  {what}")

    def may_hit_own_kv(self, request_id: str) -> bool:
        """Return True if a request may find its own KV, as after a preemption, a retry or an engine death."""
        again = request_id in self.revoked or len(self.sent_to[request_id]) > 1
        return again or any(worker.processes > 1 or _deaths(worker) for worker in self.workers)

    def settle(self) -> None:
        """Let everything finish and check that no state of any request is left."""
        self.timeline.run(self.timeline.now + SETTLE)
        self.watch.settle()
        for worker in self.workers:
            if worker.num_open:
                raise BrokenLaw("1.7", f"{worker.name} has {worker.num_open} requests open although all have ended")
            if worker.client is not None:
                self._settled(worker)
        for gateway in self.gateways:
            if gateway.num_open:
                raise BrokenLaw("7.1", f"{gateway.name} has {gateway.num_open} attempts open although all have ended")
        self._check_routers()
        for gateway in self.gateways:
            snapshot = gateway.router.snapshot()
            loads = [worker.load for worker in snapshot.workers] + [load for _, load in snapshot.departed]
            if any((load.requests, load.waiting, load.prefill_tokens) != (0, 0, 0) for load in loads):
                raise BrokenLaw("7.1", f"{gateway.name} counts {loads} although no request runs")
            for known in snapshot.workers:
                if known.index_blocks and not known.tally.served:
                    raise BrokenLaw("7.2", f"{gateway.name} has prefixes of {known.worker}, which served none")
            prefills = snapshot.roles["prefill"].served
            if prefills > self.counts["told_prefill_transferred"]:
                raise BrokenLaw("7.2", f"{gateway.name} counts {prefills} prefills, more than transferred")
            self._check_reports(gateway)

    # Inside -------------------------------------------------------------------------------------------------

    @property
    def _has_unpublished(self) -> bool:
        """Return True if workers hold unpublished prefixes: those with a salt or an adapter."""
        return any(self.plan.salts.values()) or any(self.plan.adapters.values())

    def _check_reports(self, gateway: SimulatedGateway) -> None:
        """Check that a router's view of cached blocks equals what the workers hold."""
        reported = gateway.router.reported_kv
        gateway.check()
        if len(reported) > len(self.workers):
            raise BrokenLaw("7.2", f"{gateway.name} uses reports of {len(reported)} of {len(self.workers)} workers")
        for worker in self.workers:
            if worker.client is None or worker.client.kv_log is None or self._has_unpublished:
                continue
            gateway.learn(worker)
            known = next(each for each in gateway.router.workers() if each.url == worker.url)
            blocks, held = reported.num_blocks(known), worker.client.engine.holdings().cached
            if blocks not in (None, held):
                raise BrokenLaw("7.2", f"{worker.name} holds {held} blocks, {gateway.name} assumes {blocks}")
            self.counts["reports_followed"] += blocks is not None
            if blocks is not None:
                self._check_published(gateway, worker, known)

    def _check_published(self, gateway: SimulatedGateway, worker: SimulatedWorker, known: RouterWorker) -> None:
        """Check that a router's view of every text equals what the worker holds."""
        assert worker.client is not None
        probe = worker.client.engine.probe().scheduler.probe()
        hasher = probe.prefixes.hasher
        for name, text in self.oracle.texts.items():
            tokens = np.array(text, np.int32)
            prompt = HashedPrompt(tokens, block_hasher(hasher.block_size), ())
            published = gateway.router.reported_kv.leading_tokens(prompt)[0][gateway.router._indices[known]]
            chain: list[bytes] = []
            hasher.extend(chain, hasher.root(""), tokens, len(tokens))
            held = hasher.block_size * sum(1 for _ in takewhile(probe.pool.knows, chain))
            if published != held:
                raise BrokenLaw(
                    "7.2", f"{worker.name} holds {held} tokens of {name}, {gateway.name} assumes {published}"
                )

    def _settled(self, worker: SimulatedWorker) -> None:
        name, client = worker.name, worker.client
        assert client is not None
        if client.active_requests:
            raise BrokenLaw("1.7", f"the client of {name} has {client.active_requests} requests open")
        if not client.alive:
            raise BrokenLaw("1.8", f"the engine of {name} was not restarted")
        client.engine.check_integrity()
        held = client.engine.holdings()
        if not held.idle:
            raise BrokenLaw("3.6", f"the engine of {name} holds {held} although no request runs")
        stats = client.engine.stats()
        counts = self.counts
        scheduler = stats.scheduler
        counts["preemptions"] += scheduler.counters.preemptions
        counts["loads"] += scheduler.offload.loads
        counts["loads_in_part"] += scheduler.offload.lost_tokens > 0
        counts["saves"] += scheduler.offload.saved_tokens > 0
        counts["stale_outputs"] += scheduler.outputs.stale_outputs
        if stats.kv is not None:
            if stats.kv.open_operations or stats.kv.pending_write_bytes:
                raise BrokenLaw("5.5", f"the tiers of {name} have operations open: {stats.kv}")
            counts["store_errors"] += sum(Counter(stats.kv.store_errors).values()) > 0
            counts["values_damaged"] += sum(Counter(stats.kv.damaged).values()) > 0
        if stats.leases is not None:
            if stats.leases.open:
                raise BrokenLaw("6.1", f"{name} has {stats.leases.open} leases open although no request runs")
            if stats.leases.receiver is not None:
                for outcome, count in stats.leases.receiver.outcomes.items():
                    counts[f"prefill_{outcome}"] += count

    def _make_transfers(self) -> HostileTransfers:
        return HostileTransfers(self.network, self.plan.pairs, self.watch, self.plan.seed, self.log_event)

    def _parts(self, group: SimulatedPool, name: str, process: int) -> EngineParts:
        """Return the parts of an engine, with an observer of each of its epochs."""
        parts = super()._parts(group, name, process)
        watches: list[EngineWatch] = []

        def computer() -> PlanComputer:
            watch = EngineWatch(self.watch, name, group.config, group.limits, self.plan.pairs.longest)
            watches.append(watch)
            made = parts.computer()
            assert isinstance(made, AuditedComputer | PoisonedComputer)
            made.watch = watch
            return made

        def outside(timeline: Timeline, queue: CompletionQueue, cache: KVCache) -> OutsideParts:
            watch = watches.pop()
            watch.timeline = timeline
            assert parts.outside is not None
            made = parts.outside(timeline, queue, WatchedCache(cache, watch))
            return dataclasses.replace(made, port=WatchedPort(made.port, watch))

        return dataclasses.replace(parts, computer=computer, outside=outside, adapters=_ServedAdapters)

    def _engine_of(self, target: str) -> Engine:
        client = next(worker.client for worker in self.workers if worker.name == target)
        assert client is not None
        return client.engine

    def _make_router(self, name: str) -> Router:
        rude = random.Random(f"{name}/{self.seed}") if self.plan.rude else None
        policies = partial(self._plugins.load, ROUTER_POLICY)
        return WatchedRouter(self.plan.router, policies, name, self.disguise, ADAPTERS, rude)

    def _started(self, worker: SimulatedWorker, client: SimulatedEngineClient) -> None:
        super()._started(worker, client)
        name = worker.name
        self.epochs[name] = WatchedEpochs(name, client)
        if self.plan.registers:
            for gateway in self.gateways:
                self.network.send(name, gateway.name, partial(gateway.register, worker))

    def _computer(self, target: str, limits: Limits, answer_of: AnswerOf) -> PlanComputer:
        drafter = None
        if limits.max_drafts:
            drafter = Foreseeing(self.oracle, limits.max_num_seqs, self.plan.wrong_drafts)
        audited = AuditedComputer(null_runner(limits, drafter), limits, self.counts, self.revoked)
        audited.failing = self.plan.failing_rows
        if not (self.plan.poison or self.plan.accidents):
            return audited
        return PoisonedComputer(audited, self._poison_of, lambda: target in self.sick, partial(self._kill, target))

    def _poison_of(self, request_id: str) -> Poison | None:
        return self.plan.poison.get(request_id.partition("/")[0])

    def _kill(self, target: str) -> None:
        """Kill an engine before it answers its current plan."""
        client = next(worker.client for worker in self.workers if worker.name == target)
        if client is not None:
            self.counts["poisoned"] += 1
            epoch = client.info.epoch

            def die() -> None:
                if client.info.epoch == epoch:
                    client.die("killed by a poison request")

            self.timeline.after(0.0, die)

    def _take(
        self,
        worker: SimulatedWorker,
        take: Callable[[RequestSpec, WorkerCaller], None],
        spec: RequestSpec,
        caller: WorkerCaller,
    ) -> None:
        before, name = self.sent_to[spec.request_id], worker.name
        # A pair whose prefill side failed may keep its decode side.
        if worker.role == "mixed" and name in before:
            raise BrokenLaw("7.3", f"{spec.request_id} is sent again to {name}, which failed on it")
        before.append(name)
        self._delivered.pop((name, spec.request_id), None)
        if spec.prefill_at and self.plan.pairs.strangers:
            forged = forged_ticket(spec, self.counts["strangers"])
            self.counts["strangers"] += 1
            self.timeline.after(1.0, partial(self._submit_forged_ticket, worker, take, forged))
        self.log_event(f"{spec.request_id} is sent to {worker.instance}")
        take(spec, _WatchedCaller(self, worker, spec, caller))

    def _submit_forged_ticket(
        self, worker: SimulatedWorker, take: Callable[[RequestSpec, WorkerCaller], None], forged: RequestSpec
    ) -> None:
        if forged.request_id not in worker._callers:
            take(forged, Stranger())

    def _on_disconnect(self, worker: SimulatedWorker, leave: Callable[[str], None], request_id: str) -> None:
        if worker.name in self.watch.engines:
            self.watch.engines[worker.name].left(request_id)
        leave(request_id)

    def _check_routers(self) -> None:
        for gateway in self.gateways:
            router = gateway.router
            assert isinstance(router, WatchedRouter)
            router.check()
            if router.num_in_force != gateway.num_open:
                raise BrokenLaw(
                    "7.1", f"{gateway.name} has {gateway.num_open} open attempts, not {router.num_in_force}"
                )

    def _ended(self, outcome: RequestOutcome) -> None:
        self.log_event(f"{outcome.request_id} ends with {outcome.end!r} {outcome.reason}")
        super()._ended(outcome)


class _ServedAdapters(EngineAdapters):
    """Adapters that exist without files to load."""

    def require(self, digest: str) -> None:
        if digest not in ("", *ADAPTERS):
            raise BadRequest("the adapter of the request is not loaded", field="model")


class _WatchedCaller:
    """Sender of a request to a process, as seen from that process."""

    def __init__(self, world: HostileWorld, worker: SimulatedWorker, spec: RequestSpec, caller: WorkerCaller) -> None:
        self._world = world
        self._worker = worker
        self._process = worker.instance
        self._spec = spec
        self._caller = caller
        self._over = False

    def answered(self, delta: Delta) -> None:
        name, world = self._spec.request_id, self._world
        self._check(f"answered with {delta.token_ids}")
        if not self._worker.up or self._worker.instance != self._process:
            raise BrokenLaw("7.4", f"{name} was answered by {self._process}, which is dead")
        if min(delta.token_ids, default=0) < 0:
            raise BrokenLaw("1.9", f"{name} got a negative token: {delta.token_ids}")
        world._delivered[self._worker.name, name] += len(delta.token_ids)
        if delta.cached_tokens:
            self._check_cached(delta.cached_tokens)
        if delta.prefill is not None:
            world.counts[f"told_prefill_{delta.prefill}"] += 1
        self._over = delta.finish_reason is not None
        self._caller.answered(delta)

    def refused(self, status: int, reason: str) -> None:
        self._check(f"refused: {reason}")
        self._over = True
        self._caller.refused(status, reason)

    def lost(self, reason: str) -> None:
        self._check(f"lost: {reason}")
        self._over = True
        self._caller.lost(reason)

    def _check(self, what: str) -> None:
        name = self._spec.request_id
        self._world.log_event(f"{name} at {self._process} {what}")
        if self._over:
            raise BrokenLaw("1.1", f"{name} was {what} by {self._process} after its end")

    def _check_cached(self, cached: int) -> None:
        """Check that reused KV has the same salt and adapter."""
        world, spec = self._world, self._spec
        world.counts["prefix_hits"] += 1
        most = 0
        for name, other in world.submitted.items():
            same = (other.cache_salt, other.adapter) == (spec.cache_salt, spec.adapter)
            if same and (name != spec.request_id or world.may_hit_own_kv(name)):
                most = max(most, _common(world.oracle.texts.get(name, ()), spec.prompt))
        if cached > most:
            raise BrokenLaw("5.3", f"{spec.request_id} used KV of {cached} tokens, its salt has {most}")


def _deaths(worker: SimulatedWorker) -> int:
    return 0 if worker.client is None else worker.client.deaths


def _common(text, prompt) -> int:
    count = 0
    for one, other in zip(text, prompt, strict=False):
        if one != other:
            break
        count += 1
    return count


@cache
def _plugins() -> Plugins:
    return installed_plugins()


def run_plan(plan: HostilePlan, log: Callable[[str], None] | None = None) -> tuple[Counter[str], Run]:
    """Run a world to its end; return what occurred. Raises the first broken invariant."""
    world = HostileWorld(plan, log)
    apply(plan.faults, world)
    for accident in plan.accidents:
        schedule_accident(world, accident)
    for fault in plan.faults:
        world.counts[f"fault_{fault.kind}"] += 1
        if log is not None:
            world.timeline.at(fault.at, partial(world.log_event, f"fault: {fault}"))
    run = world.run(plan.conversations, until=max(2.0, over_at(plan.faults)) + BOUND)
    world.settle()
    ids = [outcome.request_id for outcome in run.outcomes]
    if sorted(ids) != sorted(world.submitted):
        raise BrokenLaw("1", f"requests ended {sorted(ids)}, submitted were {sorted(world.submitted)}")
    if len(plan.configs) > 1:
        world.counts[f"habit_{plan.pairs.habit or 'none'}"] += 1
    kinds = {fault.kind for fault in plan.faults}
    # The watchdog treats a very slow device as hung.
    slow = any(map(_deaths, world.workers)) or world.counts["told_prefill_expired"] > 0
    killed = "device_slow" in kinds and slow
    harmless = kinds <= HARMLESS and not killed and plan.pairs.habit in HARMLESS_HABITS and plan.harmless
    for outcome in run.outcomes:
        world.counts[f"ended_{outcome.end}"] += 1
        world.counts["retries"] += outcome.attempts > 1
        too_long = outcome.prompt_tokens >= plan.limits.max_model_len
        if outcome.end not in ("stop", "length", "left") and harmless and not too_long:
            raise BrokenLaw("5.5", f"{outcome.request_id} ended with {outcome.end!r} without cause: {outcome.reason}")
    for worker in world.workers:
        if worker.client is not None:
            world.counts["engine_deaths"] += worker.client.deaths
    world.counts["messages_held"] += world.network.held
    require_complete_waits(run)
    return +world.counts, run
