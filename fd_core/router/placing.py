"""Placing one request: who is eligible, mixed or a pair, and which of them the policies choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fd_core.errors import PluginError
from fd_core.router.accounting import Ledger
from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, Policy, View
from fd_core.router.prefix_index import PrefixesInFlight, PrefixIndex, block_hasher, block_keys
from fd_core.router.published import Prompt, Published
from fd_core.router.selection import Mode, NoWorker, RouteRequest
from fd_core.router.workers import ROLES, Member, Registry, Role, Worker, WorkerState

__all__ = ["PARTS", "Placement", "Placing"]

PARTS: Mapping[Mode, tuple[Role, ...]] = {"mixed": ("mixed",), "pd": ("prefill", "decode")}
"""The roles that serve a request together, prefill side first."""

_SHORTEST_WAIT = 1.0
"""Seconds after which a client may come back at the earliest."""
_SECOND_DRAW = 2.0**26
"""A float holds 53 random bits: the upper half and the lower half are two numbers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who was chosen; nothing has been counted yet."""

    members: tuple[Member, ...]
    """One for each role of `PARTS[mode]`."""
    keys: tuple[bytes, ...]
    hits: int
    missing: int
    """Tokens of the prompt that the prefill side is believed to have to compute."""


class Placing:
    """Asks the policies. Changes nothing but what they themselves remember."""

    def __init__(
        self,
        config: RouterConfig,
        policies: Mapping[Role, Policy],
        registry: Registry,
        ledger: Ledger,
        index: PrefixIndex,
        in_flight: PrefixesInFlight,
        published: Published,
    ) -> None:
        self._config = config
        self._policies = policies
        self._registry = registry
        self._ledger = ledger
        self._index = index
        self._in_flight = in_flight
        self._published = published
        self._hasher = block_hasher(config.cache_block_size)

    def place(self, request: RouteRequest, tried: frozenset[str], now: float, random: float) -> Placement | NoWorker:
        """Choose for a request that failed on the addresses `tried`."""
        pools = self._eligible(request.model, tried, now)
        if isinstance(pools, NoWorker):
            return pools
        roles = PARTS[self._mode(pools)]
        keys: tuple[bytes, ...] = ()
        if any(self._policies[role].uses_prefix for role in roles):
            keys = block_keys(self._hasher, request.tokens, request.salt)
        members, hits, missing = [], 0, request.length
        for role, number in zip(roles, (random, random * _SECOND_DRAW % 1.0), strict=False):
            chosen = self._choose(role, pools[role], request, keys, now, number)
            if role != "decode":
                hits, missing = chosen.hits, self._missing(request, chosen)
            members.append(next(member for member in pools[role] if member.worker == chosen.worker))
        return Placement(tuple(members), keys, hits, missing)

    def possible(self) -> bool:
        """Whether a mixed worker, or both sides of a pair, are well enough to be chosen."""
        fit = [one for one in self._registry if one.state is WorkerState.HEALTHY and not one.unfit]
        return _sufficient({role: [one for one in fit if one.worker.role == role] for role in ROLES})

    def _eligible(self, model: str | None, tried: frozenset[str], now: float) -> dict[Role, list[Member]] | NoWorker:
        """Return the workers that may be chosen, by role, or the first thing that leaves too few of them."""
        pools: dict[Role, list[Member]] = {role: [] for role in ROLES}
        for member in self._registry:
            if member.state is not WorkerState.DRAINING:
                pools[member.worker.role].append(member)
        if model is not None:
            pools = _serving(model, pools)
        if not _sufficient(pools):
            return NoWorker("none_registered", "no worker is registered", self._config.health_check_interval_secs)
        healthy = {role: [one for one in pool if one.open_to_requests(now)] for role, pool in pools.items()}
        if not _sufficient(healthy):
            pauses = [one.circuit.remaining(now) for pool in pools.values() for one in pool if one.broken]
            wait = min(pauses, default=self._config.health_check_interval_secs)
            return NoWorker("none_healthy", "no worker is healthy", max(wait, _SHORTEST_WAIT))
        untried = {role: [one for one in pool if one.worker.url not in tried] for role, pool in healthy.items()}
        if not _sufficient(untried):
            return NoWorker("all_tried", "every healthy worker failed on this request", None)
        if limit := self._config.max_requests_per_worker:
            free = {
                role: [one for one in pool if self._ledger.load(one.worker).requests < limit]
                for role, pool in untried.items()
            }
            return free if _sufficient(free) else NoWorker("all_busy", "every worker is busy", _SHORTEST_WAIT)
        return untried

    def _mode(self, pools: Mapping[Role, list[Member]]) -> Mode:
        """Return what has fewer requests for each of its workers, if there is a choice."""
        modes = [mode for mode, roles in PARTS.items() if all(pools[role] for role in roles)]
        return min(modes, key=lambda mode: self._crowding(pools, PARTS[mode]))

    def _crowding(self, pools: Mapping[Role, list[Member]], roles: tuple[Role, ...]) -> float:
        members = [member for role in roles for member in pools[role]]
        return sum(self._ledger.load(member.worker).requests for member in members) / len(members)

    def _choose(
        self,
        role: Role,
        pool: list[Member],
        request: RouteRequest,
        keys: tuple[bytes, ...],
        now: float,
        random: float,
    ) -> Candidate:
        policy = self._policies[role]
        known = self._known if policy.uses_prefix else _nothing
        prompt = Prompt(request.tokens, self._hasher, keys)
        candidates = tuple(
            Candidate(one.worker, self._ledger.load(one.worker), *known(one.worker, request, prompt, keys, now))
            for one in pool
        )
        seen = keys if policy.uses_prefix else ()
        chosen = policy.choose(View(candidates, request.tokens, seen, request.session, random, now))
        if chosen not in candidates:
            name = self._config.policy_of(role)
            raise PluginError(f"router policy {name} chose {chosen!r:.200}, which is not one of the candidates")
        return chosen

    def _known(
        self, worker: Worker, request: RouteRequest, prompt: Prompt, keys: tuple[bytes, ...], now: float
    ) -> tuple[int, int]:
        """Return the leading blocks that a worker holds, and those with what it computes for others.

        It holds what it tells, or else what it served. What it tells can be compared only with the tokens of the
        workers, and is nothing of prompts with a salt.
        """
        told = self._published.tokens(worker, prompt) if request.tokenized and not request.salt else None
        hits = self._index.match(worker, keys, now) if told is None else told // self._hasher.block_size
        return hits, max(hits, self._in_flight.match(worker, keys))

    def _missing(self, request: RouteRequest, chosen: Candidate) -> int:
        """Return the tokens that are left to compute; the last one always is."""
        left = request.length - chosen.coming * self._config.cache_block_size
        return min(request.length, max(1, left))


def _nothing(*_: object) -> tuple[int, int]:
    return 0, 0


def _serving(model: str, pools: dict[Role, list[Member]]) -> dict[Role, list[Member]]:
    """Leave out who serves other models, if anybody is known to serve this one; else a worker refuses its name.

    Prefill workers may have it under another name: they are left out only where another prefill worker names it.
    """

    def named(role: Role) -> bool:
        return any(one.models is not None and model in one.models for one in pools[role])

    answered = named("mixed") or named("decode")
    strict = {"mixed": answered, "decode": answered, "prefill": named("prefill")}
    return {
        role: [one for one in pool if one.models is None or model in one.models] if strict[role] else pool
        for role, pool in pools.items()
    }


def _sufficient(pools: Mapping[Role, list[Member]]) -> bool:
    """Whether there is a mixed worker or both sides of a pair."""
    return any(all(pools[role] for role in roles) for roles in PARTS.values())
