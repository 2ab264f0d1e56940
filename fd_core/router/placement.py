"""Placement of one request: the eligible workers, mixed or as pairs, and which of them the policies choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fd_core.errors import PluginError
from fd_core.kv.prefix import PrefixHasher
from fd_core.router.accounting import WorkerLoads
from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, RouterPolicy, RoutingContext
from fd_core.router.prefix_index import PrefixesInFlight, PrefixIndex, block_hasher, block_keys
from fd_core.router.reported_kv import HashedPrompt, ReportedKV
from fd_core.router.selection import Mode, NoWorker, RouteRequest
from fd_core.router.workers import ROLES, Member, Registry, Role, RouterWorker, WorkerState

__all__ = ["PARTS", "Placement", "Placer"]

PARTS: Mapping[Mode, tuple[Role, ...]] = {"mixed": ("mixed",), "pd": ("prefill", "decode")}
"""Roles that serve a request together, the prefill side first."""

Pools = Mapping[Role, Sequence[Member]]
"""Workers by role."""
_MODELS = 64
"""Models for which it is kept who may be chosen."""
_SHORTEST_WAIT = 1.0
"""Seconds: a client is never asked to try again sooner."""
_SECOND_DRAW = 2.0**26
"""A float holds 53 random bits: the upper half and the lower half are two numbers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers that were chosen for a request; nothing has been counted yet."""

    members: tuple[Member, ...]
    """One for each role of `PARTS[mode]`."""
    keys: tuple[bytes, ...]
    """Keys of the prompt's full blocks, if a policy looks at them."""
    hits: int
    """Leading prompt blocks that the prefill side is believed to hold."""
    missing: int
    """Prompt tokens that the prefill side is believed to have to compute."""


@dataclass(slots=True)
class Placer:
    """Finds the eligible workers and asks the policies. Nothing changes but what the policies remember."""

    config: RouterConfig
    policies: Mapping[Role, RouterPolicy]
    registry: Registry
    loads: WorkerLoads
    index: PrefixIndex
    in_flight: PrefixesInFlight
    reported_kv: ReportedKV
    hasher: PrefixHasher = field(init=False)
    _kept: dict[str | None, Pools] = field(default_factory=dict)
    """Who may be chosen for each model, as long as nothing changes in the registry."""
    _adapters: frozenset[str] = frozenset()
    """Models of all workers that are adapters."""
    _version: int = -1
    """That of the registry, for which both are kept."""

    def __post_init__(self) -> None:
        self.hasher = block_hasher(self.config.cache_block_size)

    def place(self, request: RouteRequest, tried: frozenset[str], now: float, random: float) -> Placement | NoWorker:
        """Choose workers for a request that failed on the addresses `tried`."""
        self._forget_what_changed()
        pools = self._eligible(request, tried, now)
        if isinstance(pools, NoWorker):
            return pools
        roles = PARTS[self._mode(pools)]
        keys: tuple[bytes, ...] = ()
        if any(self.policies[role].uses_prefix for role in roles):
            keys = block_keys(self.hasher, request.tokens, request.salt, self._adapter(request))
        members, hits, missing = [], 0, request.length
        for role, number in zip(roles, (random, random * _SECOND_DRAW % 1.0), strict=False):
            member, chosen = self._choose(role, pools[role], request, keys, now, number)
            if role != "decode":
                hits, missing = chosen.hits, self._missing(request, chosen)
            members.append(member)
        return Placement(tuple(members), keys, hits, missing)

    def possible(self) -> bool:
        """Whether a mixed worker, or both sides of a pair, are healthy and fit for their roles."""
        fit = [one for one in self.registry if one.state is WorkerState.HEALTHY and not one.unfit]
        return _sufficient({role: [one for one in fit if one.worker.role == role] for role in ROLES})

    def _eligible(self, request: RouteRequest, tried: frozenset[str], now: float) -> Pools | NoWorker:
        """Return the workers that may be chosen, by role, or the first reason that leaves too few of them."""
        if tried or request.home is not None:
            pools = self._open(request, tried, now)
        else:
            pools = self._usual(request, now)
        if isinstance(pools, NoWorker) or not (limit := self.config.max_requests_per_worker):
            return pools
        free = _where(pools, lambda one: self.loads.of(one.worker).requests < limit)
        return free if _sufficient(free) else NoWorker("all_busy", "every worker is busy", _SHORTEST_WAIT)

    def _forget_what_changed(self) -> None:
        if self._version != self.registry.version:
            self._version = self.registry.version
            self._kept.clear()
            self._adapters = frozenset().union(*(member.adapters for member in self.registry))

    def _usual(self, request: RouteRequest, now: float) -> Pools | NoWorker:
        """Return the same for the first attempt of a request, which is found once for each state of the registry.

        While a circuit breaker is open or half open, time alone changes the answer, and nothing is kept.
        """
        kept = self._kept.get(request.model)
        if kept is not None:
            return kept
        pools = self._open(request, frozenset(), now)
        if not isinstance(pools, NoWorker) and all(one.circuit.state == "closed" for one in self.registry):
            if len(self._kept) >= _MODELS:  # clients choose the names
                self._kept.clear()
            self._kept[request.model] = pools
        return pools

    def _open(self, request: RouteRequest, tried: frozenset[str], now: float) -> Pools | NoWorker:
        """Return who is there, serves the model, is healthy and has not failed on the request."""
        found: dict[Role, list[Member]] = {role: [] for role in ROLES}
        for member in self.registry:
            if member.state is not WorkerState.DRAINING:
                found[member.worker.role].append(member)
        pools: Pools = found
        if request.model is not None:
            pools = _serving(request.model, pools)
        if request.home is not None:
            at_home = _where(pools, lambda one: one.worker == request.home or one.worker.role == "prefill")
            pools = at_home if _sufficient(at_home) else pools
        if not _sufficient(pools):
            return NoWorker("none_registered", "no worker is registered", self.config.health_check_interval_secs)
        healthy = _where(pools, lambda one: one.open_to_requests(now))
        if not _sufficient(healthy):
            pauses = [one.circuit.remaining(now) for pool in pools.values() for one in pool if one.broken]
            wait = min(pauses, default=self.config.health_check_interval_secs)
            return NoWorker("none_healthy", "no worker is healthy", max(wait, _SHORTEST_WAIT))
        untried = _where(healthy, lambda one: one.worker.url not in tried)
        if not _sufficient(untried):
            return NoWorker("all_tried", "every healthy worker failed on this request", None)
        staying = _where(untried, lambda one: not one.leaving)
        if _sufficient(staying):
            untried = staying
        return untried

    def _mode(self, pools: Pools) -> Mode:
        """Return the mode that has fewer requests for each of its workers, if there is a choice."""
        modes = [mode for mode, roles in PARTS.items() if all(pools[role] for role in roles)]
        return min(modes, key=lambda mode: self._crowding(pools, PARTS[mode])) if len(modes) > 1 else modes[0]

    def _crowding(self, pools: Pools, roles: tuple[Role, ...]) -> float:
        members = [member for role in roles for member in pools[role]]
        loads = self.loads.of_each(member.worker for member in members)
        return sum(load.requests for load in loads) / len(members)

    def _choose(
        self,
        role: Role,
        pool: Sequence[Member],
        request: RouteRequest,
        keys: tuple[bytes, ...],
        now: float,
        random: float,
    ) -> tuple[Member, Candidate]:
        policy = self.policies[role]
        workers = [one.worker for one in pool]
        loads = self.loads.of_each(workers)
        if policy.uses_prefix:
            held = self._held(workers, request, keys, now)
            computed = self.in_flight.match(workers, keys)
            expected = [one if one > other else other for one, other in zip(held, computed, strict=True)]
            candidates = tuple(map(Candidate, workers, loads, held, expected))
        else:
            candidates = tuple(map(Candidate, workers, loads))
        seen = keys if policy.uses_prefix else ()
        chosen = policy.choose(RoutingContext(candidates, request.tokens, seen, request.session, random, now))
        try:
            return pool[candidates.index(chosen)], chosen
        except ValueError:
            name = self.config.policy_of(role)
            raise PluginError(
                f"router policy {name} chose {chosen!r:.200}, which is not one of the candidates"
            ) from None

    def _held(
        self, workers: Sequence[RouterWorker], request: RouteRequest, keys: tuple[bytes, ...], now: float
    ) -> list[int]:
        """Return how many leading blocks each of `workers` holds.

        A worker holds the blocks that it reports; if it does not report, those that it served. Reports can be compared
        only with token ids of the workers, and do not cover prompts with a salt or an adapter.
        """
        if not request.tokenized or request.salt or self._adapter(request) or not len(self.reported_kv):
            return self.index.match(workers, keys, now)
        told, silent = self.reported_kv.leading_tokens(workers, HashedPrompt(request.tokens, self.hasher, keys))
        held = [tokens // self.hasher.block_size for tokens in told]
        if silent:
            served = self.index.match([workers[place] for place in silent], keys, now)
            for place, hits in zip(silent, served, strict=True):
                held[place] = hits
        return held

    def _adapter(self, request: RouteRequest) -> str:
        """Return the adapter that a request asks for, empty if no worker says that its model is one."""
        name = request.model or ""
        return name if name in self._adapters else ""

    def _missing(self, request: RouteRequest, chosen: Candidate) -> int:
        """Return the prompt tokens that the chosen worker has to compute: at least one, since the last always is."""
        left = request.length - chosen.expected_hits * self.config.cache_block_size
        return min(request.length, max(1, left))


def _serving(model: str, pools: Pools) -> Pools:
    """Return the pools without workers of other models, if a worker is known to serve `model`.

    If none is, nobody is left out, and a worker refuses the name. Prefill workers may have the model under another
    name: they are left out only where another prefill worker names it.
    """

    def named(role: Role) -> bool:
        return any(one.models is not None and model in one.models for one in pools[role])

    answered = named("mixed") or named("decode")
    strict = {"mixed": answered, "decode": answered, "prefill": named("prefill")}
    return {
        role: [one for one in pool if one.models is None or model in one.models] if strict[role] else pool
        for role, pool in pools.items()
    }


def _where(pools: Pools, test: Callable[[Member], bool]) -> dict[Role, list[Member]]:
    return {role: [member for member in pool if test(member)] for role, pool in pools.items()}


def _sufficient(pools: Pools) -> bool:
    """Whether the pools hold a mixed worker or both sides of a pair."""
    return any(all(pools[role] for role in roles) for roles in PARTS.values())
