"""Hostile worlds with many workers: few kinds of faults, at a high rate, so that rare combinations occur."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from fd_core.router.config import RouterConfig
from fd_core.router.workers import Role
from fd_core.simulation.faults import FaultKind, SimulatedFault
from fd_core.simulation.workloads.conversations import Conversation, Piece, UserTurn
from fd_core.types import SamplingParams
from tests.simulation.hostile.accidents import Accident, AccidentKind
from tests.simulation.hostile.computing import ADAPTERS

if TYPE_CHECKING:
    from tests.simulation.hostile.plans import HostilePlan

__all__ = ["routed"]

_SECONDS: Final = 1.0
_FAULTS: Final[dict[str, tuple[tuple[FaultKind, float, float], ...]]] = {
    "deaths": (("process_killed", 0.02, 0.4),),
    "partings": (("places_parted", 0.05, 0.6),),
    "slowness": (("network_slow", 0.2, 0.8), ("process_killed", 0.02, 0.1)),
    "engines": (("engine_dies", 0.0, 0.0), ("engine_hangs", 0.0, 0.0)),
    "drains": (("worker_drains", 0.1, 0.5),),
    "restarts": (("router_restarted", 0.0, 0.0), ("places_parted", 0.1, 0.4)),
}
"""Simulator faults by topic, each with bounds of its duration in seconds."""
_ACCIDENTS: Final[dict[str, AccidentKind]] = {
    "late": "messages_late",
    "aborts": "requests_aborted",
    "sick": "rows_fail",
    "deregistering": "worker_deregistered",
    "roles": "role_changed",
}
_TOPICS: Final = (
    *_FAULTS,
    *_ACCIDENTS,
    *("deaths", "partings", "slowness", "sick", "poison", "poison", "bad", "busy", "leaving", "strange", "rude"),
)

_MEETINGS: Final = (("sick", "leaving"), ("sick", "leaving"), ("sick", "busy"), ("late",), ("late",))
"""Faults that matter most with many workers, without others: abandoned trials and engines that die mid-stream."""


def routed(plan: HostilePlan, draw: random.Random) -> HostilePlan:
    """Return a world with the engines of `plan` in which most faults affect the routers."""
    full_rows = draw.random() < 0.3
    topics = set(draw.choice(_MEETINGS) if full_rows else draw.sample(_TOPICS, draw.randint(1, 4)))
    paired = len(plan.configs) > 1
    counts: dict[str, int] = {"mixed": 2 if full_rows else draw.choice((2, 3, 3, 4))}
    if paired:
        counts = {"prefill": 2, "decode": 2, "mixed": draw.choice((0, 0, 1))}
    publishes = draw.random() < (0.8 if "deaths" in topics else 0.4)
    config = msgspec.structs.replace(plan.configs[0][0], enable_prefix_caching=True, kv_events=publishes)
    limits = msgspec.structs.replace(
        plan.limits,
        max_num_seqs=1 if "busy" in topics else plan.limits.max_num_seqs,
        max_num_batched_tokens=64,
        num_kv_blocks=4 * plan.limits.blocks_per_seq,
    )
    count = draw.randint(16, 24) if full_rows else draw.randint(8, 14)
    conversations = _conversations(draw, limits.max_model_len, count, hurried="leaving" in topics)
    salts = draw.choice((("",), ("", "ab", "ac"), ("ab", "ac")))
    adapters = draw.choice((("",), ("", *ADAPTERS)))
    plan = replace(
        plan,
        limits=limits,
        configs=tuple((msgspec.structs.replace(config, role=role), count) for role, count in counts.items() if count),
        routers=draw.choice((1, 1, 2)),
        router=_router(draw, plan.limits.block_size),
        pairs=replace(plan.pairs, habit="", longest=600.0),
        failing_rows=0.0,
        tiers=False,
        stored=False,
        latency=draw.choice((0.0, 1e-4, 5e-3)),
        conversations=conversations,
        salts={each.name: draw.choice(salts) for each in conversations},
        adapters={each.name: draw.choice(adapters) for each in conversations},
        params={each.name: SamplingParams(temperature=0.0) for each in conversations},
        max_queued_requests=draw.choice((0, 0, 1)) if "busy" in topics else 1024,
        registers="slowness" in topics or draw.random() < 0.3,
        rude="rude" in topics,
    )
    strange = draw.choice(("anonymous", "misnamed")) if "strange" in topics else ""
    names = [each.name for each in conversations]
    poisoned = draw.sample(names, 2)
    return replace(
        plan,
        anonymous=strange == "anonymous",
        misnamed=_misnamed(draw, plan) if strange == "misnamed" else {},
        poison={
            **({poisoned[0]: "kills"} if "poison" in topics else {}),
            **({poisoned[1]: "fails"} if "bad" in topics else {}),
        },
        faults=_faults(draw, plan, topics),
        accidents=_accidents(draw, plan, topics),
    )


def _router(draw: random.Random, block_size: int) -> RouterConfig:
    policy = draw.choice(("cache_aware", "cache_aware", "cache_aware", "random", "request_num", "session"))
    thresholds = draw.choice(((32.0, 0.5), (0.0, 0.0), (1.0, 0.2)))
    return RouterConfig(
        policy=policy,
        prefill_policy=policy,
        decode_policy=draw.choice(("cache_aware", "request_num", "random")),
        cache_block_size=block_size,
        eviction_interval_secs=draw.choice((0.1, 60.0)),
        eviction_duration_mins=draw.choice((30.0, 30.0, 0.2 / 60)),
        max_index_blocks=draw.choice((1 << 17, 1 << 17, 3, 6)),
        balance_abs_threshold=thresholds[0],
        balance_rel_threshold=thresholds[1],
        hit_ratio_weight=draw.choice((1.0, 100.0)),
        health_check_interval_secs=draw.choice((0.05, 0.2)),
        health_check_timeout_secs=draw.choice((0.1, 5.0)),
        health_failure_threshold=draw.choice((1, 1, 2)),
        health_success_threshold=draw.choice((1, 1, 2)),
        circuit_failure_threshold=draw.choice((1, 1, 1, 2)),
        circuit_open_secs=draw.choice((0.02, 0.1)),
        circuit_max_open_secs=0.5,
        max_attempts=draw.choice((1, 2, 3, 4)),
        max_requests_per_worker=draw.choice((0, 0, 0, 2)),
    )


def _conversations(draw: random.Random, room: int, count: int, *, hurried: bool) -> tuple[Conversation, ...]:
    """Return many clients with short requests, whose prompts share a prefix of one, two or three blocks."""
    shared = [Piece(draw.getrandbits(32), draw.randint(2, room // 6)) for _ in range(3)]
    times = sorted(draw.random() * 0.9 * _SECONDS for _ in range(count))
    made = []
    for number, at in enumerate(times):
        adds = (*shared[: draw.randint(0, 3)], Piece(draw.getrandbits(32), draw.randint(1, room // 6)))
        turn = UserTurn(
            adds,
            Piece(0, 0),
            max_tokens=draw.choice((1, 2, 4, 8)),
            patience=draw.expovariate(30.0) if hurried and draw.random() < 0.6 else None,
        )
        made.append(Conversation(f"c{number}", at, (turn,), f"t{number % 2}", 0))
    return tuple(made)


def _misnamed(draw: random.Random, plan: HostilePlan) -> dict[str, Role]:
    """Return two workers that are registered as the wrong sides of a pair."""
    others: dict[str, Role] = {"prefill": "decode", "decode": "prefill"}
    one, other = draw.sample(plan.worker_names, 2)
    if one.startswith("mixed") and other.startswith("mixed"):
        return {one: "prefill", other: "decode"}
    return {name: others.get(name.rstrip("0123456789"), "decode") for name in (one,)}


def _faults(draw: random.Random, plan: HostilePlan, topics: set[str]) -> tuple[SimulatedFault, ...]:
    made = []
    for topic in sorted(topics & _FAULTS.keys()):
        for _ in range(draw.randint(3, 6)):
            kind, least, most = draw.choice(_FAULTS[topic])
            worker, router = draw.choice(plan.worker_names), f"router{draw.randrange(plan.routers)}"
            target = (router, worker) if kind in ("places_parted", "network_slow") else (worker,)
            made.append(
                SimulatedFault(
                    at=draw.random() * _SECONDS,
                    kind=kind,
                    target=(router,) if kind == "router_restarted" else target,
                    seconds=draw.uniform(least, most),
                    amount=draw.choice((0.02, 0.1, 0.3)) if kind == "network_slow" else 0.0,
                )
            )
    return tuple(sorted(made, key=lambda fault: fault.at))


def _accidents(draw: random.Random, plan: HostilePlan, topics: set[str]) -> tuple[Accident, ...]:
    made = []
    for topic in sorted(topics & _ACCIDENTS.keys()):
        for _ in range(draw.randint(2, 5)):
            at, worker = draw.random() * _SECONDS, draw.choice(plan.worker_names)
            kind, late = _ACCIDENTS[topic], topic == "late"
            seconds = draw.uniform(0.4, 0.8) if late else draw.uniform(0.1, 0.6)
            amount = draw.choice((-1.0, 0.03, 0.1) if late else (-1.0, 0.0, 0.0, 0.005))
            made.append(Accident(at=at, kind=kind, target=worker, seconds=seconds, amount=amount))
    return tuple(sorted(made, key=lambda accident: accident.at))
