"""Plan of a hostile world, drawn from its seed: workers, routers, clients and faults, all few and small."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from fd_core.config import EngineConfig, Limits, SpeculativeConfig
from fd_core.router.config import RouterConfig
from fd_core.router.workers import Role
from fd_core.simulation.costs.profile import Costs
from fd_core.simulation.faults import SimulatedFault, draw_faults
from fd_core.simulation.workloads.conversations import Conversation, Piece, UserTurn
from fd_core.types import SamplingParams, StepPlan
from tests.simulation.hostile.accidents import Accident, Poison
from tests.simulation.hostile.routed import routed

__all__ = ["HABITS", "HostilePlan", "PairPlan", "QuickCosts", "draw_plan", "without"]

VOCAB = 25
"""Vocabulary size: prompts use tokens from 16 on, nine of them; outputs use all."""
BLOCK_BYTES = 1 << 10
SECONDS = 1.0
"""Seconds within which clients arrive and faults occur."""
_ROUTER_POLICIES = (
    "random",
    "round_robin",
    "power_of_two",
    "request_num",
    "process_tokens",
    "cache_aware",
    "prefix_hash",
    "session",
)


class QuickCosts(Costs):
    """A step takes 10 ms plus time per token; everything else is short."""

    def __init__(self, token: float, copy: float) -> None:
        """`token`: seconds per token of a step; `copy`: seconds per copied block."""
        self._token = token
        self._copies = copy

    def step(self, plan: StepPlan) -> float:
        return 0.01 + self._token * plan.total_tokens

    def shared_read(self, positions: int) -> float:
        return 0.0

    def turn(self, plan: StepPlan) -> float:
        return 1e-3

    def request(self, tokens: int) -> float:
        return 1e-3

    def delivery(self) -> float:
        return 0.0

    def host_copy(self, blocks: int) -> float:
        return self._copies * blocks

    def store_read(self, blocks: int) -> float:
        return 2e-3 + self._copies * blocks

    def store_write(self, blocks: int) -> float:
        return 2e-3 + self._copies * blocks

    def transfer(self, blocks: int) -> float:
        return self._copies * blocks


HABITS = (
    *("", "first_words_lost", "late", "echo", "foreign_pieces", "damaged_pieces", "swapped_pieces", "false_commits"),
    *("early_commits", "too_much_credit", "old_credit", "misfits"),
)
"""Behaviour of the network between pairs, including forged messages; one per world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Transfer settings between prefill and decode workers."""

    window: int
    longest: float
    """Seconds after which a lease ends in any case."""
    habit: str
    every: int
    """One forged message per this many opportunities."""
    strangers: bool
    """True if a client without the secret sends requests with forged tickets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostilePlan:
    """All parameters of a hostile world."""

    seed: int
    limits: Limits
    configs: tuple[tuple[EngineConfig, int], ...]
    """Engine settings of each role, and its number of workers."""
    routers: int
    router: RouterConfig
    stored: bool
    """True if workers share a store."""
    tiers: bool
    """True if workers offload KV."""
    token_seconds: float
    copy_seconds: float
    wrong_drafts: float
    failing_rows: float
    """Share of rows that fail."""
    latency: float
    pairs: PairPlan
    conversations: tuple[Conversation, ...]
    salts: dict[str, str]
    """Salt of each conversation."""
    params: dict[str, SamplingParams]
    """Sampling parameters of each conversation; `max_tokens` is set by its turns."""
    faults: tuple[SimulatedFault, ...]
    accidents: tuple[Accident, ...] = ()
    poison: dict[str, Poison] = field(default_factory=dict)
    """Effect of each conversation's requests on the engine that computes them."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Adapter of each conversation; None selects the base model."""
    max_queued_requests: int = 1024
    anonymous: bool = False
    """True if processes report no instance name."""
    misnamed: dict[str, Role] = field(default_factory=dict)
    """Wrong roles with which some workers are registered."""
    registers: bool = False
    """True if a process notifies the routers when it has started."""
    rude: bool = False
    """True if callers of routers misuse the API."""

    @property
    def harmless(self) -> bool:
        """Return True if only faults may fail a request."""
        refused = self.max_queued_requests < 100 or self.router.max_requests_per_worker
        refused = refused or self.router.health_success_threshold > 1
        # An expired lease counts as a failure of its prefill worker.
        refused = refused or (self.paired and (self.pairs.longest < 1.0 or self.token_seconds > 0.01))
        return not (
            self.failing_rows
            or self.accidents
            or self.poison
            or self.anonymous
            or self.misnamed
            or self.registers
            or refused
        )

    @property
    def paired(self) -> bool:
        """Return True if there are prefill/decode pairs."""
        return any(config.role == "prefill" for config, _ in self.configs)

    @property
    def each_config(self) -> tuple[EngineConfig, ...]:
        """Engine settings of each worker."""
        return tuple(config for config, count in self.configs for _ in range(count))

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names of the workers."""
        roles = [config.role for config, count in self.configs for _ in range(count)]
        return tuple(f"{role}{number}" for number, role in enumerate(roles))


def draw_plan(seed: int) -> HostilePlan:
    """Return the plan of the world with this seed."""
    draw = random.Random(f"hostile/{seed}")
    paired = draw.random() < 0.3
    tight = draw.random() < 0.6
    """True if requests must grow into blocks held by others."""
    limits, k = _limits(draw, tight=tight)
    stored = draw.random() < 0.4
    token_seconds = draw.choice((2e-4, 2e-4, 5e-3, 5e-3, 0.03))
    config: dict[str, Any] = {
        "model": "null",
        "watchdog_seconds": 4.0 if token_seconds > 0.01 else 0.5,
        "block_size": limits.block_size,
        "enable_prefix_caching": paired or stored or draw.random() < 0.8,
        "save_preempted_kv": draw.random() < 0.7,
        "host_kv_memory": BLOCK_BYTES * draw.choice((0, 4, 16, 64)),
        "kv_store_timeout": draw.choice((0.05, 0.2)),
        "lease_seconds": draw.choice((0.2, 1.0)),
        "scheduling_policy": draw.choice(("fcfs", "priority", "fair")),
        "victim_policy": draw.choice(("cheapest", "youngest")),
        "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=k, cheap_tokens=1000) if k else None,
    }
    config["kv_events"] = config["enable_prefix_caching"] and draw.random() < 0.4
    if paired:
        counts = {"prefill": draw.randint(1, 2), "decode": 1 if tight else draw.randint(1, 2)}
        if draw.random() < 0.2:
            counts["mixed"] = 1
    else:
        counts = {"mixed": draw.choice((1, 1, 2) if tight else (1, 2, 3, 4))}
    configs = tuple((EngineConfig(**config, role=role), count) for role, count in counts.items())
    workers = sum(counts.values())
    routers = draw.choice((1, 1, 2)) if workers > 1 else draw.choice((0, 0, 1))
    policy = draw.choice(_ROUTER_POLICIES)
    plan = HostilePlan(
        seed=seed,
        limits=limits,
        configs=configs,
        routers=routers,
        router=RouterConfig(
            policy=policy,
            prefill_policy=policy,
            decode_policy=draw.choice(_ROUTER_POLICIES),
            cache_block_size=limits.block_size,
            health_check_interval_secs=0.5,
            health_failure_threshold=draw.choice((1, 2)),
            circuit_failure_threshold=draw.choice((1, 3)),
            circuit_open_secs=0.2,
            circuit_max_open_secs=2.0,
            max_attempts=draw.choice((2, 3, 4)),
        ),
        stored=stored,
        tiers=draw.random() < 0.8,
        token_seconds=token_seconds,
        copy_seconds=draw.choice((1e-4, 2e-3, 5e-3)),
        wrong_drafts=draw.choice((0.0, 0.3, 0.8)),
        failing_rows=draw.choice((0.0,) * 9 + (0.05,)),
        latency=draw.choice((0.0, 1e-4, 5e-3)),
        pairs=_pairs(draw),
        conversations=(conversations := _conversations(draw, limits, tight=tight)),
        salts=_salts(draw, conversations),
        params=_params(draw, conversations, tight=tight),
        faults=(),
    )
    faults = draw_faults(
        draw,
        draw.choice((0, 0, 1) if paired and plan.pairs.habit else (0, 1, 1, 2, 3)),
        seconds=SECONDS,
        workers=plan.worker_names,
        routers=tuple(f"router{number}" for number in range(routers)),
        store=stored,
        pairs=paired,
    )
    plan = replace(plan, faults=faults)
    return routed(plan, draw) if seed % 3 == 2 else plan


def without(plan: HostilePlan, conversations: set[str], faults: set[int]) -> HostilePlan:
    """Return a plan without some conversations, and without the faults and then accidents at some indexes."""
    count = len(plan.faults)
    return replace(
        plan,
        conversations=tuple(each for each in plan.conversations if each.name not in conversations),
        faults=tuple(fault for index, fault in enumerate(plan.faults) if index not in faults),
        accidents=tuple(each for index, each in enumerate(plan.accidents, count) if index not in faults),
    )


def _pairs(draw: random.Random) -> PairPlan:
    habit = draw.choice(("",) * 4 + HABITS)
    return PairPlan(
        window=draw.choice((1, 2, 3, 8)),
        longest=draw.choice((600.0, 600.0, 0.4)) if habit in ("", "echo") else 600.0,
        habit=habit,
        every=draw.choice((1, 2, 3)),
        strangers=draw.random() < 0.3,
    )


def _limits(draw: random.Random, *, tight: bool) -> tuple[Limits, int]:
    k = draw.choice((0, 0, 1, 2, 3))
    block_size = draw.choice((2, 4, 4, 8))
    max_model_len = block_size * draw.randint(32 // block_size, 56 // block_size)
    blocks_per_seq = max_model_len // block_size
    max_num_seqs = draw.choice((3, 4)) if tight else draw.randint(1, 4)
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw.choice((1 + k, max_num_seqs * (1 + k), 8 + k, 16 + k, 64)),
        max_model_len=max_model_len,
        block_size=block_size,
        num_kv_blocks=blocks_per_seq
        + draw.choice((0, 1, 2) if tight else (0, blocks_per_seq // 2, 3 * blocks_per_seq)),
        vocab_size=VOCAB,
        max_drafts=k,
        pipeline_depth=draw.choice((1, 2, 2, 3)),
    )
    return limits, k


def _conversations(draw: random.Random, limits: Limits, *, tight: bool) -> tuple[Conversation, ...]:
    """Return clients that arrive one by one or all at once; many of their prompts share a prefix."""
    made, room = [], limits.max_model_len
    shared = [Piece(draw.getrandbits(32), draw.randint(1, room // 3)) for _ in range(2)]
    burst = tight or draw.random() < 0.4
    hurry = draw.choice((5.0, 5.0, 30.0))
    """Clients that disconnect early, while the KV of their requests is in transit."""
    count = draw.randint(4, 8) if tight else draw.randint(3, 7)
    times = sorted(draw.random() * (0.02 if burst else 0.7 * SECONDS) for _ in range(count))
    for number, at in enumerate(times):
        turns = []
        for turn in range(draw.choice((1, 1, 1, 2))):
            adds = (Piece(draw.getrandbits(32), draw.randint(1, room // 5)),)
            if not turn and draw.random() < 0.7:
                adds = (draw.choice(shared), *adds)
            turns.append(
                UserTurn(
                    adds,
                    Piece(0, 0),
                    think=draw.random() * 0.2 if turn else 0.0,
                    max_tokens=draw.choice((12, 20, 30) if tight else (1, 2, 5, 8, 12, 20)),
                    patience=draw.expovariate(hurry) if draw.random() < 0.15 else None,
                )
            )
        made.append(Conversation(f"c{number}", at, tuple(turns), f"t{number % 2}", draw.choice((0, 0, 1, 5))))
    return tuple(made)


def _salts(draw: random.Random, conversations: tuple[Conversation, ...]) -> dict[str, str]:
    salts = draw.choice((("",), ("",), ("", "ab", "ac")))
    return {each.name: draw.choice(salts) for each in conversations}


def _params(draw: random.Random, conversations: tuple[Conversation, ...], *, tight: bool) -> dict[str, SamplingParams]:
    made = {}
    plain = draw.random() < 0.6
    for each in conversations:
        params: dict[str, Any] = {"temperature": 0.0}
        if not plain and draw.random() < 0.5:
            params = {"temperature": draw.choice((0.5, 1.0)), "seed": draw.getrandbits(32)}
            if draw.random() < 0.4:
                params["frequency_penalty"] = 1.0
            if draw.random() < 0.2:
                params["min_tokens"] = 3
        if draw.random() < (0.8 if tight else 0.3):
            params["ignore_eos"] = True
        if draw.random() < 0.1:
            params["stop_token_ids"] = (0,)
        made[each.name] = SamplingParams(**params)
    return made
