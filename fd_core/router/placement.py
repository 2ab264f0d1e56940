"""Placement of one request: the eligible workers, mixed or as pairs, and which of them the policies choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def __post_init__(self) -> None:
        self.hasher = block_hasher(self.config.cache_block_size)

    def place(self, request: RouteRequest, tried: frozenset[str], now: float, random: float) -> Placement | NoWorker:
        """Choose workers for a request that failed on the addresses `tried`."""
        pools = self._eligible(request, tried, now)
        if isinstance(pools, NoWorker):
            return pools
        roles = PARTS[self._mode(pools)]
        keys: tuple[bytes, ...] = ()
        if any(self.policies[role].uses_prefix for role in roles):
            keys = block_keys(self.hasher, request.tokens, request.salt, self._adapter(request))
        members, hits, missing = [], 0, request.length
        for role, number in zip(roles, (random, random * _SECOND_DRAW % 1.0), strict=False):
            chosen = self._choose(role, pools[role], request, keys, now, number)
            if role != "decode":
                hits, missing = chosen.hits, self._missing(request, chosen)
            members.append(next(member for member in pools[role] if member.worker == chosen.worker))
        return Placement(tuple(members), keys, hits, missing)

    def possible(self) -> bool:
        """Whether a mixed worker, or both sides of a pair, are healthy and fit for their roles."""
        fit = [one for one in self.registry if one.state is WorkerState.HEALTHY and not one.unfit]
        return _sufficient({role: [one for one in fit if one.worker.role == role] for role in ROLES})

    def _eligible(
        self, request: RouteRequest, tried: frozenset[str], now: float
    ) -> dict[Role, list[Member]] | NoWorker:
        """Return the workers that may be chosen, by role, or the first reason that leaves too few of them."""
        pools: dict[Role, list[Member]] = {role: [] for role in ROLES}
        for member in self.registry:
            if member.state is not WorkerState.DRAINING:
                pools[member.worker.role].append(member)
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
        if limit := self.config.max_requests_per_worker:
            free = _where(untried, lambda one: self.loads.of(one.worker).requests < limit)
            return free if _sufficient(free) else NoWorker("all_busy", "every worker is busy", _SHORTEST_WAIT)
        return untried

    def _mode(self, pools: Mapping[Role, list[Member]]) -> Mode:
        """Return the mode that has fewer requests for each of its workers, if there is a choice."""
        modes = [mode for mode, roles in PARTS.items() if all(pools[role] for role in roles)]
        return min(modes, key=lambda mode: self._crowding(pools, PARTS[mode]))

    def _crowding(self, pools: Mapping[Role, list[Member]], roles: tuple[Role, ...]) -> float:
        members = [member for role in roles for member in pools[role]]
        return sum(self.loads.of(member.worker).requests for member in members) / len(members)

    def _choose(
        self,
        role: Role,
        pool: list[Member],
        request: RouteRequest,
        keys: tuple[bytes, ...],
        now: float,
        random: float,
    ) -> Candidate:
        policy = self.policies[role]
        prompt = HashedPrompt(request.tokens, self.hasher, keys)
        candidates = tuple(
            Candidate(one.worker, self.loads.of(one.worker), *self._hits(one.worker, request, prompt, keys, now))
            if policy.uses_prefix
            else Candidate(one.worker, self.loads.of(one.worker))
            for one in pool
        )
        seen = keys if policy.uses_prefix else ()
        chosen = policy.choose(RoutingContext(candidates, request.tokens, seen, request.session, random, now))
        if chosen not in candidates:
            name = self.config.policy_of(role)
            raise PluginError(f"router policy {name} chose {chosen!r:.200}, which is not one of the candidates")
        return chosen

    def _hits(
        self, worker: RouterWorker, request: RouteRequest, prompt: HashedPrompt, keys: tuple[bytes, ...], now: float
    ) -> tuple[int, int]:
        """Return how many leading blocks a worker holds, and how many it holds or computes for others.

        A worker holds the blocks that it reports; if it does not report, those that it served. Reports can be compared
        only with token ids of the workers, and do not cover prompts with a salt or an adapter.
        """
        told = request.tokenized and not request.salt and not self._adapter(request)
        reported = self.reported_kv.leading_tokens(worker, prompt) if told else None
        hits = self.index.match(worker, keys, now) if reported is None else reported // self.hasher.block_size
        return hits, max(hits, self.in_flight.match(worker, keys))

    def _adapter(self, request: RouteRequest) -> str:
        """Return the adapter that a request asks for, empty if no worker says that its model is one."""
        name = request.model or ""
        return name if any(name in member.adapters for member in self.registry) else ""

    def _missing(self, request: RouteRequest, chosen: Candidate) -> int:
        """Return the prompt tokens that the chosen worker has to compute: at least one, since the last always is."""
        left = request.length - chosen.expected_hits * self.config.cache_block_size
        return min(request.length, max(1, left))


def _serving(model: str, pools: dict[Role, list[Member]]) -> dict[Role, list[Member]]:
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


def _where(pools: Mapping[Role, list[Member]], test: Callable[[Member], bool]) -> dict[Role, list[Member]]:
    return {role: [member for member in pool if test(member)] for role, pool in pools.items()}


def _sufficient(pools: Mapping[Role, list[Member]]) -> bool:
    """Whether the pools hold a mixed worker or both sides of a pair."""
    return any(all(pools[role] for role in roles) for roles in PARTS.values())
