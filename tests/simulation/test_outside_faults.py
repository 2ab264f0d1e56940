"""Small worlds with pairs or a store under random faults: all requests end with correct texts and KV."""

from __future__ import annotations

import random

import msgspec
import pytest

from fd_core.router.config import RouterConfig
from fd_core.simulation.faults import apply, draw_faults
from fd_core.simulation.storage.storage import SharedStore
from fd_core.simulation.workloads.conversations import Piece, UserTurn
from fd_core.simulation.world import World
from tests.simulation.helpers import PlainCosts, conversations, group, world
from tests.simulation.storage.test_outside import BLOCK_BYTES, settle

FATES = {
    "as sent": lambda number: (0.0,),
    "lost": lambda number: () if number % 5 == 0 else (0.0,),
    "repeated": lambda number: (0.0, 0.02 * (number % 3)),
    "late": lambda number: (0.05 * (number % 7),),
}
"""Fate of messages between pairs."""


class SlowCopies(PlainCosts):
    """Copies that outlast a step, so that blocks freed too early are overwritten meanwhile."""

    def host_copy(self, blocks: int) -> float:
        return 0.005 * blocks


def hostile(seed: int) -> World:
    """Return a world from a seed, with faults in its first seconds."""
    draw = random.Random(f"outside/{seed}")
    blocks = draw.choice([30, 60, 200])
    settings = {
        "limit": {"num_kv_blocks": blocks, "max_model_len": min(1024, 16 * blocks), "pipeline_depth": seed % 2 + 1},
        "block_bytes": BLOCK_BYTES,
        "restart_seconds": 0.5,
        "costs": draw.choice([PlainCosts, SlowCopies])(),
    }
    config = {"lease_seconds": draw.choice([0.5, 2.0]), "host_kv_memory": draw.choice([0, 10, 1000]) * BLOCK_BYTES}
    roles = ["prefill", "decode"] if seed % 2 else ["mixed"]
    pools = [group(count=draw.choice([1, 2]), config=config | {"role": role}, **settings) for role in roles]
    router = RouterConfig(circuit_failure_threshold=draw.choice([3, 1000]))
    one = world(*pools, seed=seed, store=draw.choice([None, SharedStore]), router=router)
    names = [worker.name for worker in one.workers]
    stored = one.store is not None
    apply(draw_faults(draw, 4, seconds=2.0, workers=names, routers=["router0"], store=stored), one)
    one.transfers.fate = FATES[draw.choice([*FATES])]
    return one


def longer(turn: UserTurn, draw: random.Random) -> UserTurn:
    return msgspec.structs.replace(turn, answer=Piece(turn.answer.seed, draw.randint(0, 150)))


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_and_leaves_no_state(seed: int) -> None:
    one = hostile(seed)
    run = one.run(conversations(6, 20.0, seed=seed, turns=2, adjust=longer), until=600.0)
    assert {outcome.end for outcome in run.outcomes} <= {"stop", "length", "left", "failed", "refused"}
    settle(one)
