"""Worlds of production engines and routers: outputs match the model, and equal arguments give equal runs."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from fd_core.config import SpeculativeConfig
from fd_core.errors import ConfigError
from fd_core.router.config import RouterConfig
from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.results.summary import Run
from fd_core.simulation.setups import Setup
from fd_core.simulation.workloads.conversations import Conversation, Piece, UserTurn
from fd_core.simulation.workloads.workload import read_workload
from fd_core.simulation.world import RunIncomplete, World
from tests.simulation.helpers import SYSTEM, PlainCosts, conversations, group, world


def ends(run: Run) -> Counter[str]:
    return Counter(outcome.end for outcome in run.outcomes)


def idle(one: World) -> bool:
    """Return True if no state of any request is left."""
    one.timeline.run(one.timeline.now + 1.0)
    engines = [worker.client.engine for worker in one.workers if worker.client is not None]
    routed = [gateway.router.snapshot() for gateway in one.gateways]
    return (
        all(engine.holdings().idle for engine in engines)
        and not any(worker.num_open for worker in one.workers)
        and all(gateway.num_open == 0 for gateway in one.gateways)
        and all(snapshot.total.requests == 0 and snapshot.faults == 0 for snapshot in routed)
    )


def test_equal_seeds_give_equal_runs() -> None:
    runs = [world(group(count=2), routers=2, seed=3).run(conversations(30, turns=2)) for _ in range(2)]
    first, second = (msgspec.json.encode(msgspec.structs.replace(run, wall_seconds=0.0)) for run in runs)
    assert first == second


@pytest.mark.parametrize("routers", [0, 1, 2])
def test_every_request_ends_once_and_leaves_no_state(routers: int) -> None:
    one = world(group(count=max(1, routers)), routers=routers)
    run = one.run(conversations(30, turns=2))
    assert ends(run) == {"stop": 60}
    assert len({outcome.request_id for outcome in run.outcomes}) == 60
    assert idle(one)


def test_images_take_their_budget_and_the_time_of_their_encoder() -> None:
    one = world(group(limit={"pipeline_depth": 1, "max_image_tokens": 64}), routers=0, latency=0.0)
    images = (Piece(3, 40, image=True), Piece(4, 60, image=True))
    turns = (UserTurn((*images, Piece(1, 28)), Piece(2, 1)), UserTurn((Piece(5, 20),), Piece(6, 1)))
    first, second = one.run([Conversation("c", 1.0, turns)]).outcomes
    # 1 ms in the server; a step for each image, whose tokens take 1 ms, because both exceed the budget.
    assert first.first_token == pytest.approx(1.0 + 0.001 + 2 * 0.01 + 128 * 1e-4 + 100 * 1e-3)
    # All blocks of the first prompt are found; its images are not encoded again.
    assert second.cached_tokens == 128
    assert second.first_token - second.arrived < 0.02
    refused = world(group(), routers=0).run([Conversation("c", 1.0, turns[:1])]).outcomes[0]
    assert "takes no images" in refused.reason


def test_single_request_takes_the_time_of_its_steps() -> None:
    one = world(group(limit={"pipeline_depth": 1}), routers=0, latency=0.0)
    run = one.run([Conversation("c", 1.0, (UserTurn((Piece(1, 100),), Piece(2, 3)),))])
    outcome = run.outcomes[0]
    # 1 ms in the server, a prefill of 100 tokens, and one decode per further token; the last one ends it.
    assert outcome.first_token == pytest.approx(1.0 + 0.001 + 0.01 + 0.01)
    assert outcome.ended == pytest.approx(1.0 + 0.001 + 0.02 + 3 * 0.0101)
    assert outcome.prompt_tokens == 100


class BusyServer(PlainCosts):
    def delivery(self) -> float:
        return 0.002


def test_serving_delays_steps_on_a_single_cpu() -> None:
    load = [Conversation("c", 1.0, (UserTurn((Piece(1, 100),), Piece(2, 3)),))]
    one = world(group(limit={"pipeline_depth": 1}, costs=BusyServer(), shares_processor=True), routers=0, latency=0.0)
    outcome = one.run(load).outcomes[0]
    assert outcome.first_token == pytest.approx(1.0 + 0.001 + 0.02 + 0.002)
    # Each further step starts when the previous token was delivered; the client waits for the last delivery.
    assert outcome.ended == pytest.approx(1.0 + 0.001 + 0.02 + 3 * (0.002 + 0.0101) + 0.002)


def test_step_completes_later_by_other_work_of_its_cpu() -> None:
    load = [Conversation(f"c{at}", 1.0 + 0.01 * at, (UserTurn((Piece(at, 100),), Piece(9, 3)),)) for at in range(2)]
    first = []
    for shares in (False, True):
        pool = group(limit={"pipeline_depth": 1}, shares_processor=shares)
        outcomes = world(pool, routers=0, latency=0.0).run(load).outcomes
        first.append(min(outcome.first_token for outcome in outcomes))
    alone, shared = first
    # Receiving the other request takes 1 ms.
    assert (alone, shared - alone) == (pytest.approx(1.021), pytest.approx(0.001))


def test_colocated_router_delays_steps_of_first_worker() -> None:
    load = [Conversation(f"c{index}", 0.0, (UserTurn((Piece(index, 100),), Piece(9, 40)),)) for index in (1, 2)]
    ended = []
    for relay in (0.0, 0.001):
        outcomes = world(group(count=2, limit={"pipeline_depth": 1}), relay=relay).run(load).outcomes
        ended.append({outcome.worker: outcome.ended for outcome in outcomes})
    alone, shared = ended
    assert shared[1] == pytest.approx(alone[1])
    assert shared[0] - alone[0] == pytest.approx(0.001 * 80, abs=0.003)


@pytest.mark.parametrize("caching", [False, True])
def test_shared_positions_are_charged_once(caching: bool) -> None:
    class Sharing(PlainCosts):
        def shared_read(self, positions: int) -> float:
            return 1e-6 * positions

    def busy(costs: PlainCosts) -> float:
        one = world(group(costs=costs, config={"enable_prefix_caching": caching}), routers=0, audit=False)
        adds = (SYSTEM, Piece(1, 8))
        one.run([Conversation(f"c{at}", 0.2 * at, (UserTurn(adds, Piece(at, 40)),)) for at in range(2)])
        return one.workers[0].client.device.busy_seconds

    saved = busy(PlainCosts()) - busy(Sharing())
    # Two blocks of 16 tokens, in each step that has both requests.
    steps = saved / 32e-6
    assert steps == pytest.approx(round(steps))
    assert (10 < steps < 42) == caching


def test_preempted_requests_lose_no_token() -> None:
    def long(turn: UserTurn, draw: random.Random) -> UserTurn:
        return msgspec.structs.replace(turn, answer=Piece(turn.answer.seed, draw.randint(50, 300)))

    one = world(group(config={"save_preempted_kv": False}, limit={"num_kv_blocks": 40}), routers=0)
    run = one.run(conversations(30, rate=200.0, adjust=long))
    assert ends(run) == {"stop": 30}
    assert run.counters["preemptions"] > 0


def test_random_draft_acceptance_does_not_change_texts() -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    drafting = group(config={"speculative": speculative}, limit={"max_drafts": 3}, acceptance=0.6)
    run = world(drafting, routers=0).run(conversations(20))
    assert ends(run) == {"stop": 20}
    assert 0 < run.counters["drafts_accepted_per_position_tokens"] < run.counters["drafts_proposed_per_position_tokens"]


def test_texts_survive_engine_death() -> None:
    one = world(group(restart_seconds=0.5), routers=0)
    for at in (0.4, 1.2):
        one.timeline.at(at, lambda: one.workers[0].client.die("a fault"))
    run = one.run(conversations(20, rate=100.0))
    assert ends(run) == {"stop": 20}
    assert one.workers[0].client.deaths == 2
    found = [(each.begin, each.end, each.restarts) for each in run.absences]
    assert found == [(0.4, pytest.approx(0.9), True), (1.2, pytest.approx(1.7), True)]


def test_hung_engine_is_detected_by_watchdog() -> None:
    one = world(group(config={"watchdog_seconds": 2.0}, restart_seconds=0.5), routers=0)
    one.timeline.at(0.4, lambda: one.workers[0].client.device.hang())
    run = one.run(conversations(10))
    assert ends(run) == {"stop": 10}
    assert one.workers[0].client.deaths == 1


def test_requests_without_token_are_retried_after_worker_death() -> None:
    one = world(group(count=3), router=RouterConfig(policy="round_robin"))
    one.timeline.at(0.5, one.workers[0].kill)
    one.timeline.at(3.0, one.workers[0].start)
    run = one.run(conversations(60))
    counted = ends(run)
    assert counted["stop"] + counted["failed"] == 60
    assert counted["failed"] <= 8
    assert any(outcome.attempts > 1 for outcome in run.outcomes if outcome.end == "stop")
    assert [(each.worker, each.begin, each.end, each.restarts) for each in run.absences] == [(0, 0.5, 3.0, False)]
    assert idle(one)


@pytest.mark.parametrize(
    ("kind", "name"), [("bursts:on=1,off=1,quiet=0.2,rate=20", "19/0"), ("closed:users=4,think=exponential:0.1", "3/9")]
)
def test_workload_is_served_completely(kind: str, name: str) -> None:
    text = f"{kind},requests=40,turns=2,prompt=uniform:1:90,output=uniform:1:9,prefixes=2x32"
    one = world(group(), routers=0)
    run = one.run(read_workload(text, 1))
    assert ends(run) == {"stop": 40}
    assert name in {outcome.request_id for outcome in run.outcomes}
    assert sum(outcome.cached_tokens for outcome in run.outcomes) > 40 * 16
    assert idle(one)


@pytest.mark.parametrize("patience", [None, 0.001])
def test_fresh_turn_drops_history_and_needs_no_prior_response(patience: float | None) -> None:
    turns = (
        UserTurn((Piece(1, 20),), Piece(2, 3), patience=patience),
        UserTurn((Piece(3, 5),), Piece(4, 3), think=1.0),
        UserTurn((Piece(5, 7),), Piece(6, 3), think=1.0, fresh=True),
    )
    one = world(group(), routers=0)
    run = one.run([Conversation("c", 0.0, turns)])
    found = [(outcome.request_id, outcome.prompt_tokens, outcome.end) for outcome in run.outcomes]
    stayed = [("c/0", 20, "stop"), ("c/1", 29, "stop"), ("c/2", 7, "stop")]
    assert found == (stayed if patience is None else [("c/0", 20, "left"), ("c/2", 7, "stop")])
    assert idle(one)


def test_disconnected_clients_free_their_state() -> None:
    def hasty(turn: UserTurn, draw: random.Random) -> UserTurn:
        return msgspec.structs.replace(turn, patience=draw.uniform(0.001, 0.5))

    one = world(group(count=2))
    run = one.run(conversations(60, rate=60.0, adjust=hasty))
    assert ends(run)["left"] > 5
    assert idle(one)


def test_oversized_prompt_is_rejected_with_reason() -> None:
    run = world(group(count=2)).run([Conversation("c", 0.0, (UserTurn((Piece(1, 2000),), Piece(2, 3)),))])
    assert run.outcomes[0].end == "refused"
    assert "1024" in run.outcomes[0].reason.replace(",", "")


def test_stalled_world_names_waiting_requests() -> None:
    one = world(group(config={"watchdog_seconds": 1000.0}), routers=0)
    one.workers[0].client.device.hang()
    with pytest.raises(RunIncomplete, match="among them c0"):
        one.run(conversations(2), until=50.0)


def test_budget_has_room_for_images_that_a_step_computes_whole() -> None:
    profile = profile_named("h100:llama-8b")
    sizes = {"max_num_batched_tokens": 1024, "max_image_tokens": 256, "max_num_seqs": 4}
    limits = msgspec.structs.replace(profile.limits, whole_images=True, **sizes)
    own = msgspec.structs.replace(profile, limits=limits)
    for budget, tokens, images in ((None, 1024, 256), (260, 260, 256), (4096, 4096, 1024)):
        (pool,) = Setup(profile=own, engine={"max_num_batched_tokens": budget}).deployment("d").groups
        found = pool.limits
        assert (found.max_num_batched_tokens, found.max_image_tokens, found.whole_images) == (tokens, images, True)
    with pytest.raises(ConfigError, match="less than an image of 256 tokens"):
        Setup(profile=own, engine={"max_num_batched_tokens": 100}).deployment("d")
