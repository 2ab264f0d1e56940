"""Policies choose by their context, and by nothing else."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, Candidates, RoundRobin, RouterPolicy, RoutingContext, least, lowest
from fd_core.router.selection import WorkerLoad
from fd_core.router.workers import RouterWorker
from tests.router.helpers import add, place, policy_class, router_of

DRAWS = [draw / 997 for draw in range(997)]


def policy(name: str, **settings: object) -> RouterPolicy:
    return policy_class(name)(RouterConfig(**settings))  # type: ignore[arg-type]


def candidate(
    number: int, requests: int = 0, tokens: int = 0, hits: int = 0, waiting: int = 0, expected_hits: int = 0
) -> Candidate:
    worker = RouterWorker(f"http://{number}", "mixed", number)
    return Candidate(worker, WorkerLoad(requests, waiting, tokens), hits, max(hits, expected_hits))


def context(
    *candidates: Candidate,
    random: float = 0.0,
    now: float = 0.0,
    tokens: tuple[int, ...] = (1,),
    blocks: int = 0,
    session: str | None = None,
    columns: bool = False,
) -> RoutingContext:
    keys = tuple(bytes([block]) for block in range(blocks))
    seen = Candidates.of(candidates)
    if columns:
        loads = np.array([seen.requests, seen.waiting, seen.prefill_tokens])
        seen = Candidates(seen.workers, loads, seen.hits.copy(), expected_hits=seen.expected_hits.copy())
    return RoutingContext(seen, np.array(tokens, np.int32), keys, session, random, now)


def number(chosen: Candidate) -> int:
    return chosen.worker.incarnation


@pytest.mark.parametrize("name", ["random", "request_num", "process_tokens", "metrics_score", "cache_aware", "session"])
@pytest.mark.parametrize("columns", [False, True])
def test_random_number_breaks_ties(name: str, columns: bool) -> None:
    equals = [candidate(index) for index in range(4)]
    counted = Counter(number(policy(name).choose(context(*equals, random=draw, columns=columns))) for draw in DRAWS)
    assert set(counted) == {0, 1, 2, 3} and max(counted.values()) - min(counted.values()) <= 1


def test_round_robin_rotates_while_workers_come_and_go() -> None:
    robin = policy("round_robin")
    a, b, c, d = (candidate(index) for index in range(4))
    assert [number(robin.choose(context(c, a, b))) for _ in range(4)] == [0, 1, 2, 0]
    assert number(robin.choose(context(a, c, d))) == 2
    assert [number(robin.choose(context(d, a))) for _ in range(2)] == [3, 0]


def test_power_of_two_takes_the_less_loaded_of_any_two() -> None:
    loaded = [candidate(0, 5), candidate(1, 3), candidate(2, 0)]
    counted = Counter(number(policy("power_of_two").choose(context(*loaded, random=draw))) for draw in DRAWS)
    assert counted[0] == 0
    assert counted[2] == pytest.approx(len(DRAWS) * 2 / 3, abs=3)
    assert counted[1] == pytest.approx(len(DRAWS) / 3, abs=3)
    assert number(policy("power_of_two").choose(context(candidate(7), random=0.9))) == 7


def test_request_num_and_process_tokens_break_each_others_ties() -> None:
    few_requests, few_tokens = candidate(0, 1, 900), candidate(1, 4, 10)
    assert number(policy("request_num").choose(context(few_tokens, few_requests))) == 0
    assert number(policy("process_tokens").choose(context(few_requests, few_tokens))) == 1
    assert number(policy("request_num").choose(context(candidate(0, 1, 9), candidate(1, 1, 8)))) == 1
    assert number(policy("process_tokens").choose(context(candidate(0, 9, 1), candidate(1, 8, 1)))) == 1


def test_metrics_score_weights_waiting_requests() -> None:
    waits, runs = candidate(0, requests=2, waiting=2), candidate(1, requests=3, waiting=0)
    assert number(policy("metrics_score").choose(context(waits, runs))) == 0
    assert number(policy("metrics_score", waiting_weight=2.0).choose(context(waits, runs))) == 1


FOUR_BLOCKS = tuple(range(4 * 64))


def test_cached_prefix_trades_against_load_by_weight() -> None:
    idle, warm = candidate(0), candidate(1, tokens=1000, hits=3)
    warm_context = context(idle, warm, tokens=FOUR_BLOCKS, blocks=4)
    assert number(policy("cache_aware").choose(warm_context)) == 1
    assert number(policy("cache_aware", load_balance_weight=2).choose(warm_context)) == 0
    assert number(policy("cache_aware", hit_ratio_weight=0.5).choose(warm_context)) == 0
    barely = candidate(1, tokens=1000, hits=2)
    assert number(policy("cache_aware").choose(context(idle, barely, tokens=FOUR_BLOCKS, blocks=4))) == 0


def test_prefix_being_computed_counts_as_cached() -> None:
    idle, busy = candidate(0), candidate(1, requests=1, tokens=256, expected_hits=4)
    assert number(policy("cache_aware").choose(context(idle, busy, tokens=FOUR_BLOCKS, blocks=4))) == 1


def test_equal_hits_are_decided_by_queue_then_requests() -> None:
    aware = policy("cache_aware")
    assert (
        number(aware.choose(context(candidate(0, 1, 900, 1), candidate(1, 2, 40, 1), tokens=FOUR_BLOCKS, blocks=4)))
        == 1
    )
    assert (
        number(aware.choose(context(candidate(0, 2, 0, 1), candidate(1, 1, 0, 1), tokens=FOUR_BLOCKS, blocks=4))) == 1
    )


def test_long_prefix_stays_while_queue_is_cheaper_than_recompute() -> None:
    history = tuple(range(100 * 64))
    home, idle = candidate(0, requests=3, tokens=20_000, hits=99), candidate(1)
    assert number(policy("cache_aware").choose(context(home, idle, tokens=history, blocks=100))) == 0


@pytest.mark.parametrize(
    "busy, settings, out_of_balance",
    [
        (33, {}, True),
        (32, {}, False),
        (33, {"balance_abs_threshold": 33}, False),
        (33, {"balance_rel_threshold": 1.0}, False),
        (33, {"balance_rel_threshold": 0.9}, True),
        (2, {"balance_abs_threshold": 1}, True),
    ],
)
def test_unbalanced_load_is_decided_by_tokens_alone(
    busy: int, settings: dict[str, float], out_of_balance: bool
) -> None:
    warm, cold = candidate(0, requests=busy, tokens=10, hits=4), candidate(1, requests=0, tokens=5)
    weights = {"load_balance_weight": 0.1} | settings
    chosen = policy("cache_aware", **weights).choose(context(warm, cold, tokens=FOUR_BLOCKS, blocks=4))
    assert number(chosen) == int(out_of_balance)


def test_prompt_shorter_than_a_block_is_placed_by_load() -> None:
    assert number(policy("cache_aware").choose(context(candidate(0, 2), candidate(1, 1), blocks=0))) == 1


def test_prefix_hash_moves_only_the_share_of_a_removed_worker() -> None:
    chooser = policy("prefix_hash", cache_block_size=2)
    four = [candidate(index) for index in range(4)]
    before = {prefix: number(chooser.choose(context(*four, tokens=(prefix, 1, 2)))) for prefix in range(400)}
    after = {prefix: number(chooser.choose(context(*four[:3], tokens=(prefix, 1, 9)))) for prefix in range(400)}
    assert all(after[prefix] == home for prefix, home in before.items() if home != 3)
    counted = Counter(before.values())
    assert set(counted) == {0, 1, 2, 3} and min(counted.values()) > 60


def test_prefix_hash_keeps_load_within_its_bound() -> None:
    chooser = policy("prefix_hash", prefix_hash_slack=0.25)
    loads = [0, 0, 0, 0]
    for placed in range(1, 101):
        loads[number(chooser.choose(context(*(candidate(index, load) for index, load in enumerate(loads)))))] += 1
        assert max(loads) <= -(-(1.25 * placed) // 4)
    assert max(loads) == 32


def test_session_is_sticky_and_moves_if_it_must() -> None:
    chooser = policy("session", eviction_duration_mins=1)
    a, b = candidate(0), candidate(1, requests=9)
    assert number(chooser.choose(context(a, b, session="s"))) == 0
    assert number(chooser.choose(context(candidate(0, 99), b, session="s"))) == 0
    assert number(chooser.choose(context(candidate(0, 99), b, session="other"))) == 1
    assert number(chooser.choose(context(candidate(0, 99), b))) == 1
    assert number(chooser.choose(context(b, session="s"))) == 1
    assert number(chooser.choose(context(a, b, session="s"))) == 1


def test_idle_session_expires_and_excess_session_is_evicted() -> None:
    chooser = policy("session", eviction_duration_mins=1, max_sessions=2)
    a, b = candidate(0), candidate(1)
    for session in ("s", "t"):
        chooser.choose(context(a, session=session))
    chooser.choose(context(a, session="s", now=30.0))
    busy = candidate(0, 1)
    chooser.choose(context(b, session="u", now=30.0))
    assert number(chooser.choose(context(busy, b, session="s", now=89.0))) == 0
    assert number(chooser.choose(context(busy, b, session="s", now=149.0))) == 1
    chooser.sweep(1000.0)
    assert number(chooser.choose(context(a, candidate(1, 1), session="s", now=1000.0))) == 0


def test_candidates_are_a_sequence_that_matches_its_columns() -> None:
    these = [candidate(index, requests=5 - index, tokens=index, hits=index, expected_hits=2) for index in range(4)]
    seen = Candidates.of(these)
    fresh = Candidates(seen.workers, np.array([seen.requests, seen.waiting, seen.prefill_tokens]), seen.hits)
    assert list(seen) == these and seen[-1] is these[-1] and seen[1:3] == tuple(these[1:3]) and len(seen) == 4
    assert [each.load.requests for each in these] == seen.requests.tolist() == fresh.requests.tolist()
    assert [each.expected_hits for each in these] == seen.expected_hits.tolist()
    third = fresh[2]
    assert fresh[2] is third and fresh.index(third) == 2 and [*fresh][2] is third and fresh.index(third) == 2
    assert fresh.index(Candidate(third.worker, third.load, third.hits, third.expected_hits)) == 2
    with pytest.raises(ValueError):
        fresh.index(Candidate(third.worker, WorkerLoad(99)))
    with pytest.raises(IndexError):
        fresh[4]
    for column in (fresh.requests, fresh.hits, fresh.expected_hits):
        assert not column.flags.writeable


@given(
    st.lists(st.tuples(*[st.integers(0, 2)] * 2), min_size=1, max_size=9),
    st.floats(0, 1, exclude_max=True),
)
def test_lowest_of_columns_equals_least_of_tuples(loads: list[tuple[int, int]], random: float) -> None:
    seen = Candidates.of(candidate(index, requests, tokens) for index, (requests, tokens) in enumerate(loads))
    by_tuples = least(seen, lambda each: (each.load.requests, each.load.prefill_tokens), random)
    assert lowest(seen, random, seen.requests, seen.prefill_tokens) is by_tuples


def test_derived_data_is_cached_while_workers_are_unchanged() -> None:
    router = router_of(mixed=2, policy="round_robin")
    seen: list[Candidates] = []
    choose = RoundRobin.choose

    class Watched(RoundRobin):
        def choose(self, context: RoutingContext) -> Candidate:
            seen.append(context.candidates)
            return choose(self, context)

    router._policies["mixed"] = Watched(RouterConfig())
    worked: list[int] = []

    def work_out(workers: tuple[RouterWorker, ...]) -> int:
        worked.append(len(workers))
        return len(workers)

    for _ in range(2):
        place(router)
    add(router, "http://late")
    place(router)
    assert [each.once(work_out) for each in seen] == [2, 2, 3] and worked == [2, 3]


@pytest.mark.parametrize(
    "name", ["request_num", "process_tokens", "metrics_score", "cache_aware", "prefix_hash", "session"]
)
@given(
    st.lists(st.tuples(*[st.integers(0, 40)] * 3, st.integers(0, 4)), min_size=2, max_size=9),
    st.floats(0, 1, exclude_max=True),
)
def test_choice_is_the_same_from_numbers_and_from_columns(
    name: str, loads: list[tuple[int, int, int, int]], random: float
) -> None:
    these = [
        candidate(index, requests + waiting, tokens, hits, waiting)
        for index, (requests, waiting, tokens, hits) in enumerate(loads)
    ]
    seen = [context(*these, random=random, tokens=(len(loads), 1), columns=columns) for columns in (False, True)]
    assert len({number(policy(name).choose(each)) for each in seen}) == 1
