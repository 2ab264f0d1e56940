"""Placement of one request: the eligible workers, mixed or as pairs, and which of them the policies choose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from fd_core.errors import PluginError
from fd_core.kv.prefix import PrefixHasher
from fd_core.router.config import RouterConfig
from fd_core.router.policies import FEW, Candidate, Candidates, RouterPolicy, RoutingContext
from fd_core.router.prefix_index import (
    HashedPrompt,
    PrefixesInFlight,
    PrefixIndex,
    ReportedKV,
    block_hasher,
    block_keys,
)
from fd_core.router.selection import IDLE, Mode, NoWorker, Numbers, RouteRequest, WorkerIndices, WorkerLoads
from fd_core.router.workers import ROLES, Member, Registry, Role, RouterWorker, WorkerState

PARTS: Mapping[Mode, tuple[Role, ...]] = {"mixed": ("mixed",), "pd": ("prefill", "decode"), "alone": ("decode",)}
"""Roles that serve a request together, the prefill side first; `alone` only where nothing else is possible."""


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """Workers of one role that may be chosen, and results computed once for all of them."""

    members: tuple[Member, ...]
    workers: tuple[RouterWorker, ...]
    indices: Numbers = field(compare=False)
    """Indices of the workers, shape [n]."""
    worked_out: dict[Callable[..., Any], Any] = field(default_factory=dict, compare=False)
    """Results that policies computed for these workers, see `Candidates.once`."""

    def __len__(self) -> int:
        return len(self.members)

    def where(self, chosen: Iterable[bool]) -> WorkerPool:
        """Return the pool of the workers whose flag in `chosen` is true."""
        chosen = [*chosen]
        if all(chosen):
            return self
        members, workers = itertools.compress(self.members, chosen), itertools.compress(self.workers, chosen)
        return WorkerPool(tuple(members), tuple(workers), self.indices[chosen])


class Pools(dict[Role, WorkerPool]):
    """Workers that may be chosen, by role."""

    @cached_property
    def options(self) -> list[tuple[Role, ...]]:
        """Roles that can serve a request together; computed once, as most requests have the same pools."""
        return [PARTS[mode] for mode in _modes(self)]


_MODELS = 64
"""Models whose eligible workers are cached."""
_SHORTEST_WAIT = 1.0
"""Seconds: the shortest Retry-After sent to a client."""
_SECOND_DRAW = 2.0**26
"""A float holds 53 random bits: the upper half and the lower half are two numbers."""


class Placement(msgspec.Struct, frozen=True):
    """The workers that were chosen for a request; nothing has been counted yet."""

    members: tuple[Member, ...]
    """One for each role of `PARTS[mode]`."""
    keys: tuple[bytes, ...]
    """Keys of the prompt's full blocks, if a policy uses them."""
    hits: int
    """Leading prompt blocks that the prefill side is believed to hold."""
    missing: int
    """Prompt tokens that the prefill side is believed to have to compute."""


@dataclass(slots=True)
class Placer:
    """Finds the eligible workers and calls the policies. Nothing changes but the state that policies keep.

    Eligible workers are computed again only if they could have changed, so a request costs nearly the same for ten
    workers as for a thousand: operations on each of them are done by numpy, for all at once.
    """

    config: RouterConfig
    policies: Mapping[Role, RouterPolicy]
    registry: Registry
    loads: WorkerLoads
    index: PrefixIndex
    in_flight: PrefixesInFlight
    reported_kv: ReportedKV
    indices: WorkerIndices
    hasher: PrefixHasher = field(init=False)
    _kept: dict[str | None, tuple[Pools, Pools]] = field(default_factory=dict)
    """For each model the healthy workers, and those of them that get a request that has not failed anywhere."""
    _adapters: frozenset[str] = frozenset()
    """Models of all workers that are adapters."""
    _version: int = -1
    """Version of the registry for which both are cached."""
    _until: float = -math.inf
    """Time at which health changes next without an event, because a circuit breaker lets a request through."""

    def __post_init__(self) -> None:
        self.hasher = block_hasher(self.config.cache_block_size)

    def place(self, request: RouteRequest, tried: frozenset[str], now: float, random: float) -> Placement | NoWorker:
        """Choose workers for a request that failed on the addresses `tried`."""
        self._forget_what_changed(now)
        pools = self._untried(request, tried, now)
        if isinstance(pools, NoWorker):
            return pools
        if limit := self.config.max_requests_per_worker:
            free = _where(pools, lambda pool: (self.loads.at(pool.indices)[0] < limit).tolist())
            if {*pools.options}.isdisjoint(free.options):  # a full prefill side must not overload decode workers
                return NoWorker("all_busy", "every worker is busy", _SHORTEST_WAIT)
            pools = free
        options = pools.options
        # If both are possible, the mode with fewer requests for each of its workers.
        roles = min(options, key=lambda roles: self._crowding(pools, roles)) if len(options) > 1 else options[0]
        keys: tuple[bytes, ...] = ()
        members: list[Member] = []
        hits, missing = 0, (length := request.length)
        # Prompts of an adapter match those of the same adapter only.
        adapter = request.model if request.model in self._adapters else None
        for role, number in zip(roles, (random, random * _SECOND_DRAW % 1.0), strict=False):
            if self.policies[role].uses_prefix and not keys:
                keys = block_keys(self.hasher, request.tokens, request.salt, adapter=adapter or "")
            member, chosen = self._choose(role, pools[role], request, adapter, keys=keys, now=now, random=number)
            if not members:  # the worker that computes the prompt
                hits = chosen.hits
                left = length - chosen.expected_hits * self.config.cache_block_size
                missing = min(length, max(1, left))  # the last token always is
            members.append(member)
        return Placement(tuple(members), keys, hits, missing=missing)

    def possible(self) -> bool:
        """Return True if a mixed or a decode worker is healthy and fit for its role."""
        fit = [one for one in self.registry if one.state is WorkerState.HEALTHY and not one.unfit]
        return _sufficient({role: [one for one in fit if one.worker.role == role] for role in ROLES})

    def _forget_what_changed(self, now: float) -> None:
        if self._version == self.registry.version and now < self._until:
            return
        self._version = self.registry.version
        self._kept.clear()
        self._adapters = frozenset().union(*(member.adapters for member in self.registry))
        circuits = (member.circuit for member in self.registry)
        self._until = min((one.until for one in circuits if one.state == "open" and one.until > now), default=math.inf)

    def _untried(self, request: RouteRequest, tried: frozenset[str], now: float) -> Pools | NoWorker:
        """Return the healthy workers on which the request has not failed; draining ones only if no other is left."""
        kept = self._kept.get(request.model) if request.home is None else None
        if kept is not None and not tried:
            return kept[1]
        healthy = self._healthy(request, now) if kept is None else kept[0]
        if isinstance(healthy, NoWorker):
            return healthy
        untried = healthy
        if tried:
            untried = _where(healthy, lambda pool: [one.url not in tried for one in pool.workers])
            if not _sufficient(untried):
                return NoWorker("all_tried", "every healthy worker failed on this request", None)
        staying = _where(untried, lambda pool: [not one.leaving for one in pool.members])
        if _sufficient(staying):
            untried = staying
        if not tried and request.home is None:
            if len(self._kept) >= _MODELS:  # clients choose the names
                self._kept.clear()
            self._kept[request.model] = healthy, untried
        return untried

    def _healthy(self, request: RouteRequest, now: float) -> Pools | NoWorker:
        found: dict[Role, list[Member]] = {role: [] for role in ROLES}
        for member in self.registry:
            if member.state is not WorkerState.DRAINING:
                found[member.worker.role].append(member)
        serving = found if request.model is None else _serving(request.model, found)
        pools = Pools()
        for role, members in serving.items():
            workers = tuple(member.worker for member in members)
            pools[role] = WorkerPool(tuple(members), workers, self.indices.among(workers))
        if request.home is not None:
            at_home = _where(pools, lambda pool: [one == request.home or one.role == "prefill" for one in pool.workers])
            pools = at_home if _sufficient(at_home) else pools
        if not _sufficient(pools):
            return NoWorker("none_registered", "no worker is registered", self.config.health_check_interval_secs)
        healthy = _where(pools, lambda pool: [one.open_to_requests(now) for one in pool.members])
        if not _sufficient(healthy):
            pauses = [one.circuit.remaining(now) for pool in pools.values() for one in pool.members if one.broken]
            wait = min(pauses, default=self.config.health_check_interval_secs)
            return NoWorker("none_healthy", "no worker is healthy", max(wait, _SHORTEST_WAIT))
        return healthy

    def _crowding(self, pools: Pools, roles: tuple[Role, ...]) -> float:
        requests = sum(int(self.loads.at(pools[role].indices)[0].sum()) for role in roles)
        return requests / sum(len(pools[role]) for role in roles)

    def _choose(
        self,
        role: Role,
        pool: WorkerPool,
        request: RouteRequest,
        adapter: str | None,
        *,
        keys: tuple[bytes, ...],
        now: float,
        random: float,
    ) -> tuple[Member, Candidate]:
        policy = self.policies[role]
        seen = keys if policy.uses_prefix else ()
        holding = computing = None
        if seen:
            holding, computing = self._held(request, adapter, keys, now), self.in_flight.match(keys)
        make = _few if len(pool.members) <= FEW else _many
        candidates = make(pool, self.loads, holding, computing)
        chosen = policy.choose(RoutingContext(candidates, request.tokens, seen, request.session, random, now))
        try:
            return pool.members[candidates.index(chosen)], chosen
        except ValueError:
            what = f"router policy {self.config.policy_of(role)} chose {chosen!r:.200}"
            raise PluginError(f"{what}, which is not a candidate") from None

    def _held(self, request: RouteRequest, adapter: str | None, keys: tuple[bytes, ...], now: float) -> Numbers | None:
        """Return the leading blocks that each worker reports to hold, or served if it does not report; None if zero."""
        if not request.tokenized or request.salt or adapter or not len(self.reported_kv):
            return self.index.match(keys, now) if self.index.holds(keys) else None
        held_tokens, silent = self.reported_kv.leading_tokens(HashedPrompt(request.tokens, self.hasher, keys))
        held = held_tokens // self.hasher.block_size
        return np.where(silent, self.index.match(keys, now), held) if silent.any() else held


def _few(pool: WorkerPool, loads: WorkerLoads, held: Numbers | None, computing: Numbers | None) -> Candidates:
    """Return the candidates of a small pool, for which a call of numpy takes longer than a loop."""
    workers = pool.workers
    known = map(loads.by_worker.get, workers, itertools.repeat(IDLE))
    if held is computing is None:
        return Candidates.of(map(Candidate, workers, known), worked_out=pool.worked_out)
    made = []
    for worker, load, index in zip(workers, known, pool.indices.tolist(), strict=True):
        hits = 0 if held is None else int(held[index])
        expected = hits if computing is None else max(hits, int(computing[index]))
        made.append(Candidate(worker, load, hits, expected))
    return Candidates.of(made, worked_out=pool.worked_out)


def _many(pool: WorkerPool, loads: WorkerLoads, held: Numbers | None, computing: Numbers | None) -> Candidates:
    hits = None if held is None else held.take(pool.indices)
    expected = hits
    if computing is not None:
        expected = computing.take(pool.indices)
        expected = expected if hits is None else np.maximum(hits, expected)
    at = loads.at(pool.indices)
    return Candidates(pool.workers, at, hits, expected_hits=expected, worked_out=pool.worked_out)


def _serving(model: str, pools: Mapping[Role, list[Member]]) -> dict[Role, list[Member]]:
    """Return the workers without those that would reject `model`, if some worker is known to serve it."""

    def named(role: Role) -> bool:
        return any(one.models is not None and model in one.models for one in pools[role])

    answered = named("mixed") or named("decode")
    strict = {"mixed": answered, "decode": answered, "prefill": named("prefill")}
    return {
        role: [one for one in pool if one.models is None or model in one.models] if strict[role] else pool
        for role, pool in pools.items()
    }


def _where(pools: Pools, chosen: Callable[[WorkerPool], Iterable[bool]]) -> Pools:
    return Pools({role: pool.where(chosen(pool)) for role, pool in pools.items()})


def _modes(pools: Mapping[Role, Sized]) -> list[Mode]:
    """Return the modes that the pools allow: a decode worker alone only where there is no other."""
    modes = [mode for mode, roles in PARTS.items() if pools[roles[0]] and pools[roles[-1]]]
    return [mode for mode in modes if mode != "alone"] or modes


def _sufficient(pools: Mapping[Role, Sized]) -> bool:
    return bool(_modes(pools))
