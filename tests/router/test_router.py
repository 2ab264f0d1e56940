"""Behaviour that the gateway relies on, case by case; `test_machine` covers the interleavings."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.errors import BadRequest, ConfigError, PluginError
from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, RouterPolicy, RoutingContext
from fd_core.router.router import Router
from fd_core.router.selection import IDLE, RouteRequest, Selection, WorkerLoad
from fd_core.router.workers import Role, WorkerState
from tests.router.helpers import (
    KV_PORT,
    add,
    chosen,
    is_idle,
    pass_check,
    place,
    policy_class,
    refused,
    request,
    router_of,
    serve,
)

PROMPT = tuple(range(8))
AWARE = {"policy": "cache_aware", "prefill_policy": "cache_aware", "cache_block_size": 2}


def test_mixed_request_counts_until_first_token_and_end() -> None:
    router = router_of(mixed=1)
    with place(router, PROMPT) as selection:
        assert (selection.mode, selection.prefill) == ("mixed", selection.decode)
        assert router.snapshot().total == WorkerLoad(1, 1, 8)
        selection.first_token()
        assert router.snapshot().total == WorkerLoad(1, 0, 0)
        router.served(selection, 0.0)
    assert is_idle(router) and router.snapshot().faults == 0


def test_pair_counts_on_both_sides_until_first_token() -> None:
    router = router_of(prefill=1, decode=1)
    selection = place(router, PROMPT)
    assert (selection.mode, selection.prefill.role, selection.decode.role) == ("pd", "prefill", "decode")
    loads = {one.worker.role: one.load for one in router.snapshot().workers}
    assert loads == {"prefill": WorkerLoad(1, 1, 8), "decode": WorkerLoad(1, 1, 0)}
    selection.first_token()
    loads = {one.worker.role: one.load for one in router.snapshot().workers}
    assert loads == {"prefill": IDLE, "decode": WorkerLoad(1, 0, 0)}
    assert selection.release()
    assert is_idle(router)


def test_pair_that_ends_before_first_token_releases_both_sides() -> None:
    router = router_of(prefill=1, decode=1)
    place(router).release()
    assert is_idle(router)


def test_prefill_length_may_differ_from_the_ids() -> None:
    router = router_of(mixed=1)
    chosen(router.select(request(PROMPT, prefill_tokens=2), 0.0, 0.0))
    assert router.snapshot().total.prefill_tokens == 2


def test_mode_with_fewer_requests_per_worker_is_chosen() -> None:
    router = router_of(mixed=1, prefill=2, decode=2)
    modes = [place(router).mode for _ in range(4)]
    assert modes == ["mixed", "pd", "pd", "mixed"]


def test_sides_of_a_pair_draw_independently() -> None:
    router = router_of(prefill=2, decode=2, prefill_policy="random", decode_policy="random")
    pairs = set()
    for draw in range(1000):
        with place(router, rng=draw * 0.618033988749895 % 1.0) as selection:
            pairs.add((selection.prefill.url, selection.decode.url))
    assert len(pairs) == 4


@pytest.mark.law("7.2")
def test_only_served_prefixes_are_recorded_and_attract() -> None:
    router = router_of(mixed=2, **AWARE)
    with place(router, PROMPT, rng=0.9) as selection:
        first = selection.decode
        router.failed(selection, first, 0.0)
    with place(router, PROMPT, rng=0.9):
        pass
    assert [one.index_blocks for one in router.snapshot().workers] == [0, 0]
    home = serve(router, PROMPT, rng=0.9)
    with place(router, PROMPT, rng=0.0) as selection:
        assert selection.decode == home and selection.hits == 4
    assert router.snapshot().tally.hit_blocks == 4


@pytest.mark.parametrize("salts", [("", "tenant"), ("tenant-1", "tenant-2"), ("a", "ab"), ("ab", "a")])
def test_requests_of_another_salt_find_nothing(salts: tuple[str, str]) -> None:
    router = router_of(mixed=1, **AWARE)
    with chosen(router.select(request(PROMPT, salt=salts[0]), 0.0, 0.0)) as selection:
        router.served(selection, 0.0)
    found = [chosen(router.select(request(PROMPT, salt=salt), 0.0, 0.0)).hits for salt in salts]
    assert found == [4, 0]


def test_pair_records_prefixes_where_the_policy_uses_them() -> None:
    router = router_of(prefill=1, decode=1, **AWARE)
    serve(router, PROMPT)
    assert {one.worker.role: one.index_blocks for one in router.snapshot().workers} == {"prefill": 4, "decode": 0}


def test_unused_prefill_is_not_recorded() -> None:
    router = router_of(prefill=1, decode=1, **AWARE)
    with place(router, PROMPT) as selection:
        router.served(selection, 0.0)
    roles = router.snapshot().roles
    assert {one.worker.role: one.index_blocks for one in router.snapshot().workers} == {"prefill": 0, "decode": 0}
    assert (roles["prefill"].served, roles["prefill"].unused, roles["decode"].served) == (0, 1, 1)


def test_completed_prefill_is_recorded_although_the_answer_failed() -> None:
    router = router_of(prefill=1, decode=1, **AWARE)
    with place(router, PROMPT) as selection:
        router.prefilled(selection, 0.0)
        router.failed(selection, selection.decode, 0.0)
    assert {one.worker.role: one.index_blocks for one in router.snapshot().workers} == {"prefill": 4, "decode": 0}
    with pytest.raises(ValueError, match="no separate prefill side"):
        router.prefilled(place(router_of(mixed=1)), 0.0)


def test_pair_has_the_kv_port_of_its_prefill_side() -> None:
    router = router_of(prefill=1, decode=1)
    assert place(router).kv_port == KV_PORT
    assert place(router_of(mixed=1)).kv_port is None


@pytest.mark.parametrize(
    ("role", "reported", "port", "eligible"),
    [
        ("prefill", "prefill", 1, True),
        ("prefill", None, 1, True),
        ("prefill", "prefill", None, False),
        ("prefill", "mixed", 1, False),
        ("decode", None, None, True),
        ("decode", "prefill", 1, False),
        ("mixed", None, None, True),
        ("mixed", "decode", None, False),
    ],
)
def test_worker_with_wrong_role_or_no_port_is_not_chosen(role: Role, reported: str, port: int, eligible: bool) -> None:
    roles = {"prefill": {"decode": 1}, "decode": {"prefill": 1}, "mixed": {}}[role]
    router = router_of(**roles)  # type: ignore[arg-type]
    worker = router.register("http://it", role, 0.0)
    router.health(worker, True, 0.0, role=reported, kv_port=port)
    answer = router.select(request(), 0.0, 0.0)
    served = eligible or role == "prefill"  # decode workers can compute prompts themselves
    assert router.ready() == isinstance(answer, Selection) == served
    assert worker not in getattr(answer, "workers", ()) or eligible
    (shown,) = (one for one in router.snapshot().workers if one.worker == worker)
    assert bool(shown.unfit) == (not eligible) and shown.kv_port == port
    if not eligible:
        assert served or refused(answer).reason == "none_healthy"
        pass_check(router, worker)
        assert worker in place(router).workers


def test_failed_check_does_not_make_a_worker_without_port_usable() -> None:
    router = router_of(decode=1, health_failure_threshold=3)
    worker = router.register("http://p", "prefill", 0.0)
    router.health(worker, True, 0.0)
    router.health(worker, False, 0.0)
    assert worker not in place(router).workers


def test_adapter_prompts_share_no_prefix_with_others() -> None:
    router = router_of(mixed=1, policy="cache_aware", cache_block_size=4)
    (worker,) = router.workers()
    router.serves(worker, ["base", "alias", "sql", "chat"], ["sql", "chat"])
    found = {}
    for name in ("base", "alias", "sql", "chat", "sql"):
        with chosen(router.select(request(range(16), model=name), 0.0, 0.0)) as selection:
            found.setdefault(name, []).append(selection.hits)
            router.served(selection, 0.0)
    assert found == {"base": [0], "alias": [4], "sql": [0, 4], "chat": [0]}


def test_worker_without_the_model_is_not_chosen() -> None:
    router = router_of(mixed=2)
    one, other = router.workers()
    router.serves(one, ["a", "b"])
    assert {chosen(router.select(request(model="b"), 0.0, rng)).decode for rng in (0.0, 0.9)} == {one, other}
    router.serves(other, ["c"])
    assert {chosen(router.select(request(model="b"), 0.0, rng)).decode for rng in (0.0, 0.9)} == {one}
    answered = [chosen(router.select(request(model="unknown"), 0.0, 0.0)).decode for _ in range(8)]
    assert set(answered) == {one, other}, "a worker has to reject it"
    router.health(one, False, 0.0)
    assert refused(router.select(request(model="a"), 0.0, 0.0)).status == 503, "the model is known, but not served now"
    assert chosen(router.select(request(), 0.0, 0.0)).decode == other
    back = router.health(one, True, 0.0)
    router.serves(one, ["c"])
    assert {chosen(router.select(request(model="a"), 0.0, 0.9)).decode for _ in range(8)} <= {back, other}


def test_prefill_worker_may_serve_the_model_under_another_name() -> None:
    router = router_of(prefill=2, decode=2)
    p, q, d, e = router.workers()
    for worker, name in ((p, "x"), (q, "y"), (d, "a"), (e, "b")):
        router.serves(worker, [name])
    pairs = [chosen(router.select(request(model="a"), 0.0, 0.0)) for _ in range(4)]
    assert {each.decode for each in pairs} == {d} and {each.prefill for each in pairs} == {p, q}
    router.serves(q, ["a"])
    assert {chosen(router.select(request(model="a"), 0.0, 0.0)).prefill for _ in range(4)} == {q}


def test_declining_worker_is_not_blamed_and_not_retried() -> None:
    router = router_of(prefill=1, decode=2, circuit_failure_threshold=1)
    with place(router) as first:
        router.declined(first, first.decode)
    with chosen(router.retry(first, 0.0, 0.0)) as second:
        assert second.prefill == first.prefill and second.decode != first.decode
        router.declined(second, second.prefill)
        router.served(second, 0.0)
    tally = router.snapshot().tally
    assert (tally.declined, tally.left, tally.served, tally.failed) == (2, 1, 1, 0)
    assert all(one.circuit == "closed" for one in router.snapshot().workers)


def test_prefix_expires_and_its_memory_is_freed() -> None:
    router = router_of(mixed=1, eviction_duration_mins=1, eviction_interval_secs=10, **AWARE)
    serve(router, PROMPT, now=1.0)
    with place(router, PROMPT, now=60.9) as selection:
        assert selection.hits == 4
    with place(router, PROMPT, now=61.0) as selection:
        assert selection.hits == 0
    place(router, PROMPT, now=80.0).release()
    assert router.snapshot().workers[0].index_blocks == 0


@pytest.mark.law("7.2")
def test_policy_gets_a_nonempty_prompt() -> None:
    seen: list[RoutingContext] = []

    class Curious(RouterPolicy):
        uses_prefix = True

        def choose(self, context: RoutingContext) -> Candidate:
            seen.append(context)
            return context.candidates[0]

    router = Router(RouterConfig(cache_block_size=2), lambda name: Curious)
    add(router, "http://a")
    chosen(router.select(request(PROMPT, session="me"), 7.0, 0.5))
    (context,) = seen
    assert (tuple(context.tokens), len(context.keys), context.session, context.random, context.now) == (
        PROMPT,
        4,
        "me",
        0.5,
        7.0,
    )
    assert not context.tokens.flags.writeable
    with pytest.raises(BadRequest, match="no tokens"):
        RouteRequest(np.zeros(0, np.int32))


def test_invalid_choice_of_a_policy_is_an_error_without_counts() -> None:
    class Wild(RouterPolicy):
        def choose(self, context: RoutingContext) -> Candidate:
            return Candidate(context.candidates[0].worker, WorkerLoad(99))

    router = Router(RouterConfig(), lambda name: Wild)
    add(router, "http://a")
    with pytest.raises(PluginError, match="not a candidate"):
        router.select(request(), 0.0, 0.0)
    assert is_idle(router)


def test_unhealthy_workers_are_not_chosen() -> None:
    router = router_of(mixed=3, **AWARE)
    sick, *others = router.workers()
    router.health(sick, False, 1.0)
    assert {place(router, now=1.0).decode for _ in range(8)} == set(others)


def test_load_of_unhealthy_worker_does_not_unbalance_others() -> None:
    router = router_of(mixed=3, balance_abs_threshold=0, load_balance_weight=0.1, **AWARE)
    sick, warm, _ = [one.worker for one in router.snapshot().workers]
    router.health(warm, False, 0.0)
    only = router.workers()[2]
    router.health(only, False, 0.0)
    held = [place(router) for _ in range(5)]
    assert {selection.decode for selection in held} == {sick}
    router.health(sick, False, 1.0)
    warm = router.health(warm, True, 1.0)
    serve(router, PROMPT)
    router.health(only, True, 1.0)
    assert all(serve(router, PROMPT, rng=rng) == warm for rng in (0.0, 0.5, 0.99))


@pytest.mark.law("7.4")
def test_health_checks_never_write_counters() -> None:
    router = router_of(mixed=1, health_failure_threshold=2)
    selection = place(router, PROMPT)
    worker = selection.decode
    for ok in (True, False, True, False, False):
        router.health(worker, ok, 1.0)
        assert router.snapshot().total == WorkerLoad(1, 1, 8)
        assert router.snapshot().workers[0].load == WorkerLoad(1, 1, 8)
    again = router.health(worker, True, 2.0)
    assert again != worker
    state = router.snapshot()
    assert state.workers[0].load == IDLE and dict(state.departed) == {worker: WorkerLoad(1, 1, 8)}
    selection.release()
    assert is_idle(router)


@pytest.mark.law("7.4")
def test_returning_worker_holds_nothing() -> None:
    router = router_of(mixed=1, **AWARE)
    worker = serve(router, PROMPT)
    late = place(router, PROMPT)
    router.health(worker, False, 1.0)
    again = router.health(worker, True, 2.0)
    with place(router, PROMPT) as selection:
        assert selection.decode == again and selection.hits == 0
    router.served(late, 3.0)
    late.release()
    assert router.snapshot().index_blocks == 0
    assert is_idle(router)


@pytest.mark.law("7.3")
def test_retries_use_every_other_worker_once() -> None:
    router = router_of(mixed=2)
    with place(router) as first:
        router.failed(first, first.decode, 0.0)
    with chosen(router.retry(first, 0.0, 0.0)) as second:
        assert second.decode != first.decode and second.attempt == 2
        router.failed(second, second.decode, 0.0, severe=True)
    answer = refused(router.retry(second, 0.0, 0.0))
    assert (answer.reason, answer.status, answer.retry_after) == ("all_tried", 502, None)
    assert is_idle(router) and router.snapshot().retries == 1


def test_pair_keeps_the_side_that_did_not_fail() -> None:
    router = router_of(prefill=2, decode=1)
    with place(router) as first:
        router.failed(first, first.prefill, 0.0)
    second = chosen(router.retry(first, 0.0, 0.0))
    assert second.prefill != first.prefill and second.decode == first.decode


def test_attempt_without_verdict_is_retried_elsewhere() -> None:
    router = router_of(mixed=2)
    with place(router) as first:
        pass
    assert chosen(router.retry(first, 0.0, 0.0)).decode != first.decode


def test_returning_worker_still_counts_as_tried() -> None:
    router = router_of(mixed=1)
    with place(router) as first:
        router.failed(first, first.decode, 0.0)
    router.health(first.decode, False, 0.0)
    router.health(first.decode, True, 0.0)
    assert refused(router.retry(first, 0.0, 0.0)).reason == "all_tried"


def test_attempts_are_bounded() -> None:
    router = router_of(mixed=3, max_attempts=2)
    first = place(router)
    first.release()
    second = chosen(router.retry(first, 0.0, 0.0))
    second.release()
    assert refused(router.retry(second, 0.0, 0.0)).reason == "too_many_attempts"


@pytest.mark.law("7.3")
def test_no_retry_after_the_answer_started() -> None:
    router = router_of(mixed=2)
    with place(router) as selection:
        selection.first_token()
        router.failed(selection, selection.decode, 0.0)
    assert refused(router.retry(selection, 0.0, 0.0)).reason == "answer_started"


def test_retry_before_release_raises() -> None:
    router = router_of(mixed=2)
    with pytest.raises(RuntimeError, match="release the failed attempt"):
        router.retry(place(router), 0.0, 0.0)


def test_no_worker_or_no_healthy_worker() -> None:
    router = router_of(prefill=1)
    assert refused(router.select(request(), 0.0, 0.0)).reason == "none_registered"
    worker = router.register("http://d", "decode", 0.0)
    answer = refused(router.select(request(), 0.0, 0.0))
    assert (answer.reason, answer.status, answer.retry_after) == ("none_healthy", 503, 5.0)
    router.health(worker, True, 0.0)
    assert place(router).mode == "pd"
    assert router.snapshot().refused == {"none_registered": 1, "none_healthy": 1}


def test_all_workers_busy() -> None:
    router = router_of(mixed=2, max_requests_per_worker=1)
    first, second = place(router), place(router)
    assert first.decode != second.decode
    answer = refused(router.select(request(), 0.0, 0.0))
    assert (answer.reason, answer.status) == ("all_busy", 429)
    second.release()
    assert place(router).decode == second.decode


def test_unreachable_worker_is_avoided_then_tried_once() -> None:
    router = router_of(mixed=1, circuit_open_secs=4)
    with place(router) as selection:
        router.failed(selection, selection.decode, 0.0, severe=True)
    answer = refused(router.select(request(), 1.0, 0.0))
    assert (answer.reason, answer.retry_after) == ("none_healthy", 3.0)
    trial = place(router, now=4.0)
    assert refused(router.select(request(), 4.0, 0.0)).reason == "none_healthy"
    trial.release()  # the client disconnected: no verdict
    with place(router, now=4.0) as selection:
        router.served(selection, 4.0)
    assert router.snapshot().workers[0].circuit == "closed"
    place(router, now=4.0), place(router, now=4.0)


def test_unreachable_worker_gets_no_more_requests() -> None:
    router = router_of(mixed=1)
    with place(router) as selection:
        router.failed(selection, selection.decode, 0.0, severe=True)
    assert refused(router.select(request(), 0.5, 0.0)).reason == "none_healthy"


def test_deregistered_worker_finishes_its_requests() -> None:
    router = router_of(mixed=1)
    selection = place(router)
    assert router.deregister("http://mixed0", 1.0) == selection.decode
    assert refused(router.select(request(), 1.0, 0.0)).reason == "none_registered"
    (shown,) = router.snapshot().workers
    assert (shown.state, shown.since, shown.load.requests) == (WorkerState.DRAINING, 1.0, 1)
    router.served(selection, 2.0)
    selection.release()
    assert router.snapshot().workers == () and is_idle(router)
    assert router.deregister("http://mixed0", 2.0) is None


def test_idle_worker_is_removed_on_deregistration() -> None:
    router = router_of(mixed=1)
    router.deregister("http://mixed0", 1.0)
    assert router.workers() == ()


def test_repeated_or_late_report_is_only_a_fault() -> None:
    router = router_of(mixed=1, **AWARE)
    selection = place(router, PROMPT)
    router.failed(selection, selection.decode, 0.0)
    router.served(selection, 0.0)
    assert selection.release() and not selection.release()
    late = place(router, PROMPT)
    late.release()
    router.served(late, 0.0)
    state = router.snapshot()
    assert (state.faults, state.tally.served, state.tally.failed, state.tally.left) == (3, 0, 1, 1)
    assert state.workers[0].index_blocks == 0 and is_idle(router)


def test_only_workers_of_the_selection_can_be_blamed() -> None:
    router = router_of(mixed=2)
    selection = place(router)
    (other,) = set(router.workers()) - {selection.decode}
    with pytest.raises(ValueError, match="not a worker of this selection"):
        router.failed(selection, other, 0.0)


def test_invalid_settings_and_policies_are_rejected() -> None:
    with pytest.raises(ConfigError, match="max-attempts: 0 is out of range"):
        router_of(max_attempts=0)
    with pytest.raises(PluginError, match="unknown router policy 'best'"):
        Router(RouterConfig(policy="best"), policy_class)


def test_returning_worker_starts_without_load() -> None:
    router = router_of(mixed=1)
    before = [place(router) for _ in range(3)]
    back, other = add(router, "http://mixed0"), add(router, "http://other")
    assert {place(router).decode for _ in range(2)} == {back, other}
    for selection in before:
        selection.release()
    assert {place(router).decode for _ in range(2)} == {back, other}
    assert router._indices[add(router, "http://last")] <= 3, "slots of removed workers are reused"


def test_returning_worker_starts_without_prefixes_in_flight() -> None:
    router = router_of(prefill=1, decode=1, **AWARE)
    selection = place(router, PROMPT)
    selection.first_token()  # the prefill side no longer counts, but may still be computing
    add(router, selection.prefill.url, "prefill")
    with place(router, PROMPT):
        assert router.snapshot().total.prefill_tokens == len(PROMPT)
    selection.release()
    assert router._indices[add(router, "http://last")] <= 2 and is_idle(router)


def test_decode_worker_prefills_without_available_prefill_worker() -> None:
    router = router_of(prefill=1, decode=1, circuit_open_secs=4)
    with place(router, PROMPT) as pair:
        router.failed(pair, pair.prefill, 0.0, severe=True)
        router.served(pair, 0.0)
    alone = place(router, PROMPT, now=1.0)
    assert (alone.mode, alone.workers, alone.kv_port) == ("alone", (pair.decode,), None)
    assert router.ready() and router.snapshot().total == WorkerLoad(1, 1, len(PROMPT)), "it computes the prompt as well"
    alone.first_token()
    assert router.snapshot().total == WorkerLoad(1, 0, 0)
    router.served(alone, 1.0)
    alone.release()
    assert is_idle(router) and router.snapshot().faults == 0
    assert place(router, now=4.0).mode == "pd", "the prefill worker is tried again"
    assert router.snapshot().modes == {"mixed": 0, "pd": 2, "alone": 1}


def test_decode_worker_alone_counts_hits_by_its_own_policy() -> None:
    router = router_of(decode=2, decode_policy="cache_aware", cache_block_size=2)
    home = serve(router, PROMPT, rng=0.9)
    with place(router, PROMPT, rng=0.0) as selection:
        assert (selection.mode, selection.decode, selection.hits) == ("alone", home, 4)
        assert router.snapshot().total.prefill_tokens == 1
    assert router.snapshot().roles["decode"].hit_blocks == 4


def test_decode_alone_only_as_retry_or_without_other_modes() -> None:
    router = router_of(prefill=1, decode=2)
    with place(router) as first:
        router.failed(first, first.prefill, 0.0)
        router.declined(first, first.decode)
    second = chosen(router.retry(first, 0.0, 0.0))
    assert second.mode == "alone" and second.decode != first.decode
    add(router, "http://m")
    assert {place(router, rng=rng).mode for rng in (0.0, 0.3, 0.6, 0.9)} <= {"mixed", "pd"}


def test_full_prefill_side_does_not_shift_load_to_decode() -> None:
    router = router_of(prefill=1, decode=2, max_requests_per_worker=1)
    first = place(router)
    assert refused(router.select(request(), 0.0, 0.0)).reason == "all_busy"
    first.first_token()
    assert place(router).mode == "pd"
