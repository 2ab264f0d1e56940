"""Prompts that other workers compute, and prompts that are computed for them: leases, their blocks and their ends."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.config import Limits
from fd_core.effects.operations import Cancel, Fetch, Fetched, GiveUp, Send, Sent
from fd_core.scheduling.contract import SchedulerSetup
from fd_core.scheduling.operations.kv_transferring import TransferCounters
from fd_core.scheduling.policies import Fcfs
from fd_core.scheduling.requests import Request, State
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import LatestArrival
from fd_core.types import FinishReason, PrefillJob, PrefillOutcome, RequestSpec, SamplingParams
from tests.scheduling.driving import add, answer, next_plan, num_loading, num_running, planned, take_effects
from tests.scheduling.test_scheduler import HASHER

FAILURES: list[PrefillOutcome] = ["refused", "lost", "expired", "damaged", "aborted"]


def scheduler(**changes: int) -> ContinuousBatchingScheduler:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "block_size": 4,
        "num_kv_blocks": 20,
        "vocab_size": 100,
    }
    made = ContinuousBatchingScheduler(
        SchedulerSetup(
            limits=Limits(**(values | changes)), policy=Fcfs(), victims=LatestArrival(), hasher=HASHER, paired=True
        )
    )
    made.probe().control.forecast.share = 0.0  # nothing is kept in reserve but what a test says
    return made


def elsewhere(name: str, length: int, max_tokens: int = 8, salt: str = "", first: int = 0) -> RequestSpec:
    """A request whose prompt another worker computes."""
    return RequestSpec(
        request_id=name,
        prompt=tuple(range(first, first + length)),
        params=SamplingParams(max_tokens=max_tokens),
        prefill_at="peer:1",
        cache_salt=salt,
    )


def here(name: str, length: int, max_tokens: int = 8, first: int = 0) -> RequestSpec:
    return RequestSpec(
        request_id=name,
        prompt=tuple(range(first, first + length)),
        params=SamplingParams(max_tokens=max_tokens),
    )


def leased(name: str, length: int, first: int = 0, salt: str = "") -> RequestSpec:
    """A request that computes its prompt for another worker, which has the `first` blocks of it."""
    return RequestSpec(
        request_id=name,
        prompt=tuple(range(length)),
        params=SamplingParams(max_tokens=1),
        prefill_job=PrefillJob(b"", first, lease=f"lease of {name}"),
        cache_salt=salt,
    )


def counters(s: ContinuousBatchingScheduler) -> TransferCounters:
    return s.probe().transferring.counters


def fetch_of(s: ContinuousBatchingScheduler) -> Fetch:
    (fetch,) = take_effects(s)
    assert isinstance(fetch, Fetch)
    return fetch


def begin(s: ContinuousBatchingScheduler, spec: RequestSpec) -> tuple[Request, Fetch]:
    """Add a request to an idle scheduler and have it wait for its KV."""
    request = add(s, spec)
    assert next_plan(s) is None
    return request, fetch_of(s)


def sends(s: ContinuousBatchingScheduler) -> list[Send]:
    effects = take_effects(s)
    assert all(isinstance(effect, Send) for effect in effects)
    return [effect for effect in effects if isinstance(effect, Send)]


def finish(s: ContinuousBatchingScheduler, request: Request, reason: FinishReason = FinishReason.LENGTH) -> None:
    """End a running request before its time, through a back door."""
    assert request.slot is not None
    s.probe().residencies.finish(request.slot, request, reason)


def compute(s: ContinuousBatchingScheduler, spec: RequestSpec) -> None:
    """Run a request until its prompt is computed and end it, so that the device has its prefix."""
    request = add(s, spec)
    while not request.num_generated:
        answer(s, planned(s))
    if request.ended is None:
        finish(s, request)


def is_idle(s: ContinuousBatchingScheduler) -> bool:
    s.check_integrity()
    return not s.has_work and s.probe().pool.num_free == s.limits.num_kv_blocks and not s.probe().prefixes.num_computing


def preempt(s: ContinuousBatchingScheduler, request: Request) -> None:
    """Take a running request back for want of blocks, and let it wait again."""
    slot = request.slot
    hostage = s.probe().pool.allocate(s.probe().pool.num_free)
    assert hostage is not None
    for _ in range(12):
        plan = planned(s)
        answer(s, plan)
        if slot in [back.slot for back in plan.revocations]:
            break
    s.probe().pool.release(hostage, -1)
    assert request.state is State.WAITING


# The decode side ----------------------------------------------------------------------------------------------


def test_a_prompt_is_fetched_but_for_its_last_token() -> None:
    s = scheduler()
    spec = RequestSpec(
        request_id="a",
        prompt=tuple(range(11)),
        params=SamplingParams(max_tokens=8),
        prefill_at="peer:1",
        cache_salt="s",
        priority=3,
        tenant="t",
    )
    request, fetch = begin(s, spec)
    assert request.state is State.LOADING
    assert fetch.peer == "peer:1"
    assert fetch.job == PrefillJob(np.arange(10, dtype="<i4").tobytes(), 0, "s", 3, "t")
    assert fetch.blocks.tolist() == s.probe().slots.blocks(0).tolist()
    assert len(fetch.blocks) == 3, "the last block is a partial one"
    s.check_integrity()


def test_behind_transferred_kv_only_the_last_token_is_computed() -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    s.complete(Fetched(fetch.operation, "transferred", cached=8))
    plan = planned(s)
    (admission,) = plan.admissions
    assert (admission.computed, admission.token_ids.tolist()) == (10, list(range(11)))
    assert (plan.starts.tolist(), plan.num_tokens.tolist(), plan.samples.tolist()) == ([10], [1], [True])
    assert (request.prefill, request.cached_tokens) == ("transferred", 8)
    counted = counters(s)
    assert (counted.outcomes, counted.fetched_tokens) == ({"transferred": 1}, 10)
    answer(s, plan)
    finish(s, request)
    assert is_idle(s)


def test_complete_blocks_that_were_transferred_are_a_known_prefix_and_the_partial_one_is_not() -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    assert not s.probe().pool.knows(request.chain[0]), "nothing came yet"
    s.complete(Fetched(fetch.operation, "transferred"))
    assert s.probe().pool.match(request.chain).tolist() == fetch.blocks[:2].tolist()
    assert s.probe().slots.num_registered[0] == 2


@pytest.mark.parametrize(("said", "cached"), [(0, 8), (8, 8), (10, 10), (99, 12)])
def test_cached_is_what_either_side_had(said: int, cached: int) -> None:
    s = scheduler()
    compute(s, here("before", 9))
    request, fetch = begin(s, elsewhere("a", 13))
    assert (fetch.job.held_blocks, len(fetch.blocks)) == (2, 1)
    s.complete(Fetched(fetch.operation, "transferred", cached=said))
    assert request.cached_tokens == cached
    assert counters(s).fetched_tokens == 4


@pytest.mark.parametrize("outcome", FAILURES)
def test_whatever_else_became_of_it_the_prompt_is_computed_here(outcome: PrefillOutcome) -> None:
    s = scheduler()
    compute(s, here("before", 5))
    request, fetch = begin(s, elsewhere("a", 11))
    s.complete(Fetched(fetch.operation, outcome, cached=8))
    plan = planned(s)
    assert (plan.starts.tolist(), plan.num_tokens.tolist()) == ([4], [7]), "behind what the device had"
    assert (request.prefill, request.cached_tokens) == (outcome, 4)
    assert counters(s).outcomes == {outcome: 1}
    assert not counters(s).fetched_tokens
    assert not take_effects(s), "it is tried once"
    answer(s, plan)
    finish(s, request)
    assert is_idle(s)


@pytest.mark.parametrize("outcome", FAILURES)
@pytest.mark.law("3.5")
def test_blocks_of_a_failed_fetch_name_no_prefix(outcome: PrefillOutcome) -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    s.complete(Fetched(fetch.operation, outcome))
    assert not s.probe().pool.match(request.chain).tolist()
    plan = planned(s)
    assert not s.probe().pool.knows(request.chain[0]), "it is being computed"
    answer(s, plan)
    assert s.probe().pool.match(request.chain).tolist() == fetch.blocks[:2].tolist()


@pytest.mark.parametrize(("known", "length", "asks"), [(0, 4, False), (0, 5, True), (9, 12, False), (9, 13, True)])
def test_less_than_a_block_is_computed_here_without_asking(known: int, length: int, asks: bool) -> None:
    s = scheduler()
    if known:
        compute(s, here("before", known))
    request = add(s, elsewhere("a", length))
    plan = next_plan(s)
    if asks:
        assert plan is None
        assert len(fetch_of(s).blocks) == 1
    else:
        assert plan is not None
        assert not take_effects(s)
        assert request.prefill == "held"
        assert counters(s).outcomes == {"held": 1}


def test_a_request_without_a_peer_is_computed_here() -> None:
    s = scheduler()
    request = add(s, here("a", 11))
    assert planned(s).num_tokens.tolist() == [11]
    assert request.prefill is None
    assert not counters(s).outcomes


def test_a_restarted_request_that_has_a_text_goes_on_here() -> None:
    s = scheduler()
    spec = elsewhere("a", 11)
    again = RequestSpec(
        request_id="a", prompt=spec.prompt, params=spec.params, prefill_at=spec.prefill_at, delivered=(50, 51)
    )
    s.add(again)
    assert planned(s).num_tokens.tolist() == [13]
    assert not take_effects(s)


@pytest.mark.parametrize("outcome", ["transferred", *FAILURES])
@pytest.mark.law("3.2")
def test_blocks_are_pinned_until_the_fetch_is_over_though_its_request_was_aborted(outcome: PrefillOutcome) -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    assert s.abort("a")
    assert not s.abort("a")
    (cancel,) = take_effects(s)
    assert cancel == Cancel(fetch.operation)
    assert (request.state, num_loading(s)) == (State.FINISHED, 0)
    assert (s.probe().pool.num_fenced, s.probe().pool.num_owned) == (3, 0)
    assert s.has_work, "somebody may still write the blocks"
    s.check_integrity()
    s.add(here("b", 9))
    answer(s, planned(s))
    assert not set(s.probe().slots.blocks(0).tolist()) & set(fetch.blocks.tolist())
    s.complete(Fetched(fetch.operation, outcome, cached=8))
    assert s.probe().pool.num_fenced == 0
    assert counters(s).outcomes == {"aborted": 1}
    assert not counters(s).fetched_tokens
    assert num_running(s) == 1, "nobody came back"
    finish(s, s.probe().requests["b"])
    assert is_idle(s)


def test_a_late_answer_does_not_reach_another_request_of_the_same_name() -> None:
    s = scheduler()
    _, fetch = begin(s, elsewhere("a", 11))
    s.abort("a")
    take_effects(s)
    second, other = begin(s, elsewhere("a", 11))
    s.complete(Fetched(fetch.operation, "transferred"))
    assert second.state is State.LOADING
    assert next_plan(s) is None
    s.complete(Fetched(other.operation, "transferred"))
    assert second.state is State.RUNNING


def test_a_fetch_in_flight_holds_back_nobody_with_the_same_prompt() -> None:
    s = scheduler()
    fetching = add(s, elsewhere("a", 11))
    assert next_plan(s) is None
    first = fetch_of(s)
    also_fetching, computing = add(s, elsewhere("b", 11)), add(s, here("c", 11))
    plan = planned(s)
    second = fetch_of(s)
    assert [fetching.state, also_fetching.state, computing.state] == [State.LOADING, State.LOADING, State.RUNNING]
    assert not set(second.blocks.tolist()) & set(first.blocks.tolist())
    assert (plan.starts.tolist(), plan.num_tokens.tolist()) == ([0], [11])
    s.check_integrity()


def test_once_the_prompt_has_come_whoever_has_the_same_one_fetches_nothing() -> None:
    s = scheduler(max_num_seqs=1)
    requests = [add(s, elsewhere(name, 11, max_tokens=1)) for name in "ab"]
    assert next_plan(s) is None
    s.complete(Fetched(fetch_of(s).operation, "transferred"))
    answer(s, planned(s))
    plan = planned(s)
    assert [admission.computed for admission in plan.admissions] == [8]
    assert [request.prefill for request in requests] == ["transferred", "held"]
    assert not take_effects(s)


def test_of_two_fetches_of_one_prompt_each_ends_for_itself() -> None:
    s = scheduler()
    requests = [add(s, elsewhere(name, 11)) for name in "ab"]
    assert next_plan(s) is None
    first, second = (effect for effect in take_effects(s) if isinstance(effect, Fetch))
    s.abort("a")
    assert take_effects(s) == [Cancel(first.operation)]
    s.complete(Fetched(first.operation, "aborted"))
    s.complete(Fetched(second.operation, "transferred"))
    plan = planned(s)
    assert (plan.starts.tolist(), plan.num_tokens.tolist()) == ([10], [1])
    assert [request.prefill for request in requests] == ["aborted", "transferred"]
    assert s.probe().pool.match(requests[1].chain).tolist() == second.blocks[:2].tolist()


def test_who_waits_for_a_prefill_here_fetches_if_that_is_given_up() -> None:
    s = scheduler()
    s.add(here("a", 11))
    waiting = add(s, elsewhere("b", 11))
    prefill = planned(s)
    assert (waiting.state, take_effects(s)) == (State.WAITING, [])
    s.abort("a")
    revoking = planned(s)
    assert waiting.state is State.LOADING
    assert fetch_of(s).request_id == "b"
    answer(s, prefill)
    answer(s, revoking)


def test_the_same_prompt_under_another_salt_is_another_prompt() -> None:
    s = scheduler()
    s.add(elsewhere("a", 11, salt="x"))
    s.add(elsewhere("b", 11, salt="y"))
    assert next_plan(s) is None
    assert [effect.job.cache_salt for effect in take_effects(s) if isinstance(effect, Fetch)] == ["x", "y"]
    assert num_loading(s) == 2


def test_who_waits_for_kv_counts_against_the_number_of_requests_at_a_time() -> None:
    s = scheduler(max_num_seqs=2)
    for index in range(3):
        s.add(elsewhere(f"r{index}", 6, first=10 * index))
    assert next_plan(s) is None
    assert len(take_effects(s)) == 2
    assert (num_loading(s), len(s.probe().waiting)) == (2, 1)


@pytest.mark.parametrize(("max_tokens", "leases"), [(1, 2), (5, 1)])
@pytest.mark.law("6.1")
def test_a_lease_is_taken_only_with_room_for_what_loading_requests_will_grow_to(max_tokens: int, leases: int) -> None:
    s = scheduler(num_kv_blocks=10)
    s.probe().control.forecast.share = 1.0
    s.probe().control.return_cost.share = 10.0
    s.add(elsewhere("a", 16, max_tokens))
    s.add(elsewhere("b", 16, max_tokens, first=40))
    assert next_plan(s) is None
    assert len(take_effects(s)) == leases
    assert num_loading(s) == leases


def test_who_is_aborted_between_arrival_and_plan_leaves_with_its_release() -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    s.complete(Fetched(fetch.operation, "transferred"))
    assert not s.abort("a")
    plan = planned(s)
    assert [back.slot for back in plan.revocations] == [0]
    answer(s, plan)
    assert request.ended is FinishReason.ABORT
    assert is_idle(s)


def test_preempted_behind_a_fetch_it_comes_back_like_any_other() -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    s.complete(Fetched(fetch.operation, "transferred"))
    for _ in range(2):
        answer(s, planned(s))
    preempt(s, request)
    s.probe().pool.forget_prefixes()
    known = 11 + request.num_generated
    assert known > 11
    plan = planned(s)
    assert (plan.starts.tolist(), plan.num_tokens.tolist()) == ([0], [known])
    assert not take_effects(s), "there is no second fetch"
    assert request.prefill == "transferred"


def test_preempted_before_its_first_token_it_does_not_fetch_again_either() -> None:
    s = scheduler(max_num_batched_tokens=4)
    s.add(here("old", 3, 30, first=50))
    answer(s, planned(s))
    request = add(s, elsewhere("a", 30))
    answer(s, planned(s))
    s.complete(Fetched(fetch_of(s).operation, "lost"))
    answer(s, planned(s))
    preempt(s, request)
    assert not request.num_generated
    answer(s, planned(s))
    assert request.state is State.RUNNING
    assert not take_effects(s)


def test_an_answer_without_pairs_is_a_fault() -> None:
    s = ContinuousBatchingScheduler(
        SchedulerSetup(limits=scheduler().limits, policy=Fcfs(), victims=LatestArrival(), hasher=HASHER)
    )
    with pytest.raises(RuntimeError, match="not open"):
        s.complete(Sent(1))


# The prefill side ---------------------------------------------------------------------------------------------


def test_settled_blocks_leave_once_and_in_order_while_the_rest_is_computed() -> None:
    s = scheduler(max_num_batched_tokens=4)
    request = add(s, leased("a", 11))
    told = []
    for _ in range(3):
        plan = planned(s)
        table = s.probe().slots.blocks(0)
        assert not take_effects(s), "what is in flight is not settled"
        answer(s, plan)
        told += sends(s)
    assert request.ended is FinishReason.LENGTH
    assert [(send.first, send.blocks.tolist(), send.tokens) for send in told] == [
        (0, [table[0]], None),
        (1, [table[1]], None),
        (2, [table[2]], 11),
    ]
    assert {send.lease for send in told} == {"lease of a"}
    assert counters(s).sent_blocks == 3
    assert not take_effects(s), "the last send is the end; there is nothing to give up"
    for send in told:
        s.complete(Sent(send.operation))
    assert is_idle(s)


def test_with_steps_in_flight_only_answered_ones_count() -> None:
    s = scheduler(max_num_batched_tokens=4)
    s.add(leased("a", 14))
    plans = [planned(s) for _ in range(3)]
    assert not sends(s)
    answer(s, plans[0])
    assert [(send.first, len(send.blocks)) for send in sends(s)] == [(0, 1)]
    answer(s, plans[1])
    assert [(send.first, len(send.blocks)) for send in sends(s)] == [(1, 1)]


def test_a_prompt_of_whole_blocks_ends_with_an_empty_send() -> None:
    s = scheduler()
    s.add(leased("a", 8))
    answer(s, planned(s))
    first, last = sends(s)
    assert (first.first, len(first.blocks), first.tokens) == (0, 2, None)
    assert (last.first, len(last.blocks), last.tokens) == (2, 0, 8)


def test_blocks_of_a_cached_prefix_are_sent_before_anything_is_computed() -> None:
    s = scheduler()
    compute(s, here("before", 9))
    s.add(leased("a", 11))
    plan = planned(s)
    (send,) = sends(s)
    assert (send.first, send.blocks.tolist(), send.tokens) == (0, s.probe().slots.blocks(0)[:2].tolist(), None)
    answer(s, plan)
    (last,) = sends(s)
    assert (last.first, len(last.blocks), last.tokens, last.cached) == (2, 1, 11, 8)


def test_a_prefix_cached_under_another_salt_is_not_used() -> None:
    s = scheduler()
    compute(s, here("before", 9))
    s.add(leased("a", 11, salt="other"))
    assert planned(s).num_tokens.tolist() == [11]
    assert not sends(s)


@pytest.mark.parametrize(("first", "expected"), [(1, [(1, 1), (2, 1)]), (2, [(2, 1)]), (3, [(3, 0)])])
def test_blocks_that_the_other_worker_has_are_computed_but_not_sent(
    first: int, expected: list[tuple[int, int]]
) -> None:
    s = scheduler()
    s.add(leased("a", 11, first))
    plan = planned(s)
    assert plan.num_tokens.tolist() == [11]
    table = s.probe().slots.blocks(0)
    answer(s, plan)
    told = sends(s)
    assert [(send.first, len(send.blocks)) for send in told] == expected
    assert [block for send in told for block in send.blocks.tolist()] == table[first:].tolist()
    assert [send.tokens for send in told] == [*[None] * (len(told) - 1), 11]


def test_blocks_that_are_sent_are_pinned_until_they_were_read() -> None:
    s = scheduler()
    s.add(leased("a", 11))
    answer(s, planned(s))
    first, last = sends(s)
    assert s.has_work, "somebody reads the blocks"
    assert s.probe().pool.num_fenced == 3
    s.check_integrity()
    s.complete(Sent(last.operation))
    assert s.probe().pool.num_fenced == 2
    s.complete(Sent(first.operation))
    assert is_idle(s)


def test_blocks_that_are_still_sent_are_a_known_prefix() -> None:
    s = scheduler()
    s.add(leased("a", 11))
    answer(s, planned(s))
    told = sends(s)
    s.add(leased("b", 11))
    plan = planned(s)
    assert plan.num_tokens.tolist() == [3], "nothing of it is computed twice"
    assert s.probe().slots.blocks(0)[:2].tolist() == [block for send in told for block in send.blocks.tolist()][:2]
    s.check_integrity()
    for send in told:
        s.complete(Sent(send.operation))
    answer(s, plan)
    for send in sends(s):
        s.complete(Sent(send.operation))
    assert is_idle(s)


def test_a_block_that_two_leases_send_is_pinned_for_both() -> None:
    s = scheduler()
    compute(s, here("before", 5))
    for name in "ab":
        s.add(leased(name, 5))
    answer(s, planned(s))
    told = sends(s)
    shared = [send for send in told if send.first == 0]
    assert len(shared) == 2
    assert shared[0].blocks.tolist() == shared[1].blocks.tolist()
    s.complete(Sent(shared[0].operation))
    assert not set(shared[0].blocks.tolist()) & set(s.probe().pool._cached)
    for send in told:
        if send is not shared[0]:
            s.complete(Sent(send.operation))
    assert is_idle(s)


def taken_back_in_the_middle(s: ContinuousBatchingScheduler) -> tuple[Request, Request]:
    """Return an old request and a leased one that was preempted behind its first two blocks, both sent."""
    old = add(s, here("old", 6, 30, first=50))
    while not old.num_generated:
        answer(s, planned(s))
    request = add(s, leased("a", 16))
    for _ in range(2):
        answer(s, planned(s))
    told = sends(s)
    assert [(send.first, len(send.blocks)) for send in told] == [(0, 1), (1, 1)]
    for send in told:
        s.complete(Sent(send.operation))
    preempt(s, request)
    return old, request


@pytest.mark.parametrize("forgotten", [True, False])
def test_preempted_in_the_middle_it_goes_on_behind_what_was_sent(forgotten: bool) -> None:
    s = scheduler(max_num_batched_tokens=5)
    _, request = taken_back_in_the_middle(s)
    sent = request.sent
    if forgotten:
        s.probe().pool.forget_prefixes()
    take_effects(s)
    told: list[Send] = []
    for _ in range(8):
        plan = planned(s)
        samples = request.slot is not None and bool(plan.samples[plan.slots == request.slot].any())
        answer(s, plan)
        told += sends(s)
        if samples:
            break
    assert request.ended is FinishReason.LENGTH
    places = [send.first + index for send in told for index in range(len(send.blocks))]
    assert places == list(range(sent, 4))
    assert [send.tokens for send in told if send.tokens is not None] == [16]
    assert request.preemptions == 1


def test_who_is_aborted_while_it_waits_gives_up_once() -> None:
    s = scheduler()
    s.add(leased("a", 11))
    assert s.abort("a")
    assert not s.abort("a")
    assert s.has_work, "its decode worker is not told yet"
    (effect,) = take_effects(s)
    assert isinstance(effect, GiveUp)
    assert effect.lease == "lease of a"
    assert "abort" in effect.reason
    assert counters(s).given_up == 1
    assert is_idle(s)


def test_who_is_aborted_while_it_runs_gives_up_with_its_release() -> None:
    s = scheduler(max_num_batched_tokens=4)
    s.add(leased("a", 11))
    answer(s, planned(s))
    (send,) = sends(s)
    s.abort("a")
    plan = planned(s)
    assert not take_effects(s)
    answer(s, plan)
    (effect,) = take_effects(s)
    assert isinstance(effect, GiveUp)
    s.complete(Sent(send.operation))
    assert is_idle(s)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_who_fails_gives_up_and_sends_nothing_more(reason: FinishReason) -> None:
    s = scheduler(max_num_batched_tokens=8)
    request = add(s, leased("a", 11))
    answer(s, planned(s))
    before = sends(s)
    assert before
    finish(s, request, reason)
    (effect,) = take_effects(s)
    assert isinstance(effect, GiveUp)
    for send in before:
        s.complete(Sent(send.operation))
    assert is_idle(s)


def test_who_ends_while_it_drains_gives_up_once() -> None:
    """Its blocks have no owner any more, so nobody may read them."""
    s = scheduler()
    old = add(s, here("old", 3, 30, first=50))
    answer(s, planned(s))
    request = add(s, leased("a", 11))
    step = planned(s)
    hostage = s.probe().pool.allocate(s.probe().pool.num_free)
    assert hostage is not None
    slot = request.slot
    assert slot is not None
    backs = []
    while not backs:
        plan = planned(s)
        backs = plan.revocations
        if not backs:
            s.probe().slots.num_tokens[old.slot] += 1
    assert [back.slot for back in backs] == [slot]
    s.probe().residencies.finish(slot, s.probe().slots.request_in(slot), FinishReason.LENGTH)
    (effect,) = take_effects(s)
    assert isinstance(effect, GiveUp)
    assert counters(s).given_up == 1
    s.probe().pool.answered(step.step)
    s.probe().pool.answered(plan.step)
    s.probe().residencies.release(slot)
    assert not take_effects(s), "it is said once"
    s.probe().pool.release(hostage, -1)


def test_other_requests_send_nothing() -> None:
    s = scheduler()
    request = add(s, here("a", 11))
    answer(s, planned(s))
    finish(s, request)
    s.add(here("b", 11))
    s.abort("b")
    assert not take_effects(s)
    assert is_idle(s)


def test_sent_blocks_are_a_copy_of_the_table() -> None:
    s = scheduler()
    s.add(leased("a", 11))
    answer(s, planned(s))
    first, _ = sends(s)
    kept = first.blocks.copy()
    s.probe().slots.tables[:] = 0
    assert np.array_equal(first.blocks, kept)
    assert not first.blocks.flags.writeable
