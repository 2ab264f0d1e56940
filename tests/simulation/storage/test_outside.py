"""Worlds with KV offload and transfers, using production tiers and leases, under faults as well."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from fd_core.kv.stores.contract import FailureReason
from fd_core.router.config import RouterConfig
from fd_core.simulation.clock.timeline import Timeline
from fd_core.simulation.engines.engine import SimulatedPool
from fd_core.simulation.results.summary import Run
from fd_core.simulation.storage.storage import SharedStore, TimedKVCache
from fd_core.simulation.workloads.conversations import Piece, UserTurn
from fd_core.simulation.world import World
from fd_core.types import IntArray
from tests.simulation.helpers import conversations, group, world
from tests.simulation.kv_checked import WrongKV

BLOCK_BYTES = 1 << 20


def ends(run: Run) -> Counter[str]:
    return Counter(outcome.end for outcome in run.outcomes)


def twice(run: Callable[[], tuple[World, Run]]) -> tuple[World, Run]:
    """Run a world twice, compare the results bytewise, and return the first."""
    (one, first), (_, second) = run(), run()
    encoded = [msgspec.json.encode(msgspec.structs.replace(result, wall_seconds=0.0)) for result in (first, second)]
    assert encoded[0] == encoded[1]
    return one, first


def settle(one: World) -> None:
    """Let everything finish and check that no state of any request is left."""
    one.timeline.run(one.timeline.now + 30.0)
    for worker in one.workers:
        if worker.client is not None:
            assert worker.client.engine.holdings().idle
            stats = worker.client.engine.stats()
            assert stats.kv is None or (stats.kv.open_operations, stats.kv.pending_write_bytes) == (0, 0)
            assert stats.leases is None or stats.leases.open == 0


def long(turn: UserTurn, draw: random.Random) -> UserTurn:
    return msgspec.structs.replace(turn, answer=Piece(turn.answer.seed, draw.randint(50, 300)))


def tight(**config: object) -> SimulatedPool:
    return group(config=config, limit={"num_kv_blocks": 40}, block_bytes=BLOCK_BYTES)


def stored(count: int = 2) -> SimulatedPool:
    return group(count=count, block_bytes=BLOCK_BYTES)


def pair(prefills: int = 1, **config: object) -> tuple[SimulatedPool, SimulatedPool]:
    return group(count=prefills, config={"role": "prefill"} | config), group(config={"role": "decode"} | config)


def test_kv_of_preempted_requests_is_saved_and_loaded() -> None:
    def run() -> tuple[World, Run]:
        one = world(tight(), routers=0)
        return one, one.run(conversations(12, rate=200.0, adjust=long))

    one, result = twice(run)
    assert ends(result) == {"stop": 12}
    assert result.counters["preemptions"] > 0 and result.counters["kv_restored_tokens"] > 0
    settle(one)


def test_worker_loads_kv_stored_by_another() -> None:
    def run(store: Callable[[Timeline], SharedStore] | None = SharedStore) -> tuple[World, Run]:
        one = world(stored(), router=RouterConfig(policy="round_robin"), store=store)
        return one, one.run(conversations(8, turns=3))

    one, result = twice(run)
    assert ends(result) == {"stop": 24}
    assert result.counters["kv_restored_tokens"] > 0
    cached = [sum(outcome.cached_tokens for outcome in run(store)[1].outcomes) for store in (SharedStore, None)]
    assert cached[0] > cached[1]
    settle(one)


@pytest.mark.parametrize("fault", ["dead", "full", "slow", "lost", "damaged"])
def test_texts_are_correct_under_store_faults(fault: str) -> None:
    def fail(store: SharedStore) -> None:
        match fault:
            case "dead":
                store.fault = FailureReason.TIMEOUT
            case "full":
                store.write_fault = FailureReason.FULL
            case "slow":
                store.slowness = 500.0
            case "lost":
                store.lose(2)
            case "damaged":
                store.damage(2)

    one = world(stored(), router=RouterConfig(policy="round_robin"), store=SharedStore)
    assert one.store is not None
    for at in (0.5, 1.0, 1.5):
        one.timeline.at(at, lambda: fail(one.store))
    assert ends(one.run(conversations(8, turns=2))) == {"stop": 16}
    failed = Counter[str]()
    for worker in one.workers:
        kv = worker.client.engine.stats().kv
        failed += Counter(kv.store_errors) + Counter(kv.damaged)
    assert fault == "lost" or failed
    settle(one)


def outcomes(one: World) -> Counter[str]:
    """Return the prefill outcomes of decode workers."""
    counted = Counter[str]()
    for worker in one.workers:
        leases = worker.client.engine.stats().leases
        if leases is not None and leases.receiver is not None:
            counted += Counter(leases.receiver.outcomes)
    return counted


def test_pair_serves_prompts_with_transferred_kv() -> None:
    def run() -> tuple[World, Run]:
        one = world(*pair())
        return one, one.run(conversations(8, turns=2))

    one, result = twice(run)
    assert ends(result) == {"stop": 16}
    assert set(outcomes(one)) <= {"transferred", "held"} and outcomes(one)["transferred"] > 12
    settle(one)


@pytest.mark.parametrize("fault", ["parted", "lossy", "twice", "late"])
def test_texts_of_a_pair_are_correct_under_network_faults(fault: str) -> None:
    def fail(one: World) -> None:
        match fault:
            case "parted":
                one.network.part("prefill0", "decode1")
                one.timeline.after(3.0, lambda: one.network.join("prefill0", "decode1"))
            case "lossy":
                one.transfers.fate = lambda number: () if number % 5 == 0 else (0.0,)
            case "twice":
                one.transfers.fate = lambda number: (0.0, 0.05)
            case "late":
                one.transfers.fate = lambda number: (0.1 * (number % 3),)

    one = world(*pair(lease_seconds=1.0), router=RouterConfig(circuit_failure_threshold=1000))
    one.timeline.at(0.3, lambda: fail(one))
    assert ends(one.run(conversations(8, turns=2))) == {"stop": 16}
    assert outcomes(one)["transferred"] > 0
    broken = outcomes(one)["expired"] + outcomes(one)["lost"]
    assert (broken > 0) == (fault in ("parted", "lossy"))
    settle(one)


def test_requests_survive_death_of_prefill_worker_mid_lease() -> None:
    one = world(*pair(prefills=2))
    one.timeline.at(0.305, lambda: one.workers[0].client.die("a fault"))
    assert ends(one.run(conversations(8, turns=2))) == {"stop": 16}
    assert outcomes(one)["lost"] > 0 and outcomes(one)["transferred"] > 0
    settle(one)


@pytest.mark.parametrize("fault", ["lost", "foreign"])
@pytest.mark.parametrize("way", ["the host tier", "a pair"])
def test_corrupt_copy_is_detected_before_it_is_used(way: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(cache: TimedKVCache, blocks: IntArray, data: np.ndarray) -> None:
        if fault == "foreign":
            cache._cache.import_blocks(blocks, cache._cache.export_blocks((blocks + 1) % cache.num_blocks))

    monkeypatch.setattr(TimedKVCache, "import_blocks", wrong)
    one = world(tight(), routers=0) if way == "the host tier" else world(*pair())
    with pytest.raises(WrongKV, match=r"step \d+ computes position \d+ of .* in slot \d, but block"):
        one.run(conversations(12, rate=200.0, adjust=long))
