"""Remote prefill on both sides: leases, their blocks and their ends."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fd_core.effects.operations import AbandonLease, Cancel, Fetch, Fetched, Send, Sent
from fd_core.scheduling.operations.kv_transferring import TransferCounters
from fd_core.scheduling.requests import Request, State
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.types import FinishReason, PrefillJob, PrefillOutcome, RequestSpec, SamplingParams
from tests.scheduling.driving import (
    HASHER,
    add,
    answer,
    next_plan,
    num_loading,
    num_running,
    planned,
    spec,
    take_effects,
)
from tests.scheduling.driving import scheduler as unpaired

FAILURES: list[PrefillOutcome] = ["refused", "lost", "expired", "damaged", "aborted"]


scheduler = partial(unpaired, hasher=HASHER, paired=True)


def elsewhere(name: str, length: int, max_tokens: int = 8, salt: str = "", first: int = 0) -> RequestSpec:
    """Return a request whose prompt another worker computes."""
    return RequestSpec(
        request_id=name,
        prompt=tuple(range(first, first + length)),
        params=SamplingParams(max_tokens=max_tokens),
        prefill_at="peer:1",
        cache_salt=salt,
    )


here = spec


def leased(name: str, length: int, first: int = 0, salt: str = "") -> RequestSpec:
    """Return a request that computes its prompt for another worker, which holds the `first` blocks of it."""
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
    """Add a request to an idle scheduler and step until it waits for its KV."""
    request = add(s, spec)
    assert next_plan(s) is None
    return request, fetch_of(s)


def sends(s: ContinuousBatchingScheduler) -> list[Send]:
    effects = take_effects(s)
    assert all(isinstance(effect, Send) for effect in effects)
    return [effect for effect in effects if isinstance(effect, Send)]


def finish(s: ContinuousBatchingScheduler, request: Request, reason: FinishReason = FinishReason.LENGTH) -> None:
    """End a running request early by overriding its limit."""
    assert request.slot is not None
    s.probe().running_batch.finish(request.slot, request, reason)


def compute(s: ContinuousBatchingScheduler, spec: RequestSpec) -> None:
    """Run a request until its prompt is computed and end it, so that the device caches its prefix."""
    request = add(s, spec)
    while not request.num_generated:
        answer(s, planned(s))
    if request.ended is None:
        finish(s, request)


def is_idle(s: ContinuousBatchingScheduler) -> bool:
    s.check_integrity()
    return not s.has_work and s.probe().pool.num_free == s.limits.num_kv_blocks and not s.probe().prefixes.num_computing


def preempt(s: ContinuousBatchingScheduler, request: Request) -> None:
    """Preempt a running request for lack of blocks and step until it waits again."""
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


# Decode worker ------------------------------------------------------------------------------------------------


def test_prompt_is_fetched_except_its_last_token() -> None:
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
    assert fetch.blocks.tolist() == s.probe().slots.owned(0).tolist()
    assert len(fetch.blocks) == 3, "the last block is a partial one"
    s.check_integrity()


def test_only_last_token_is_computed_after_transfer() -> None:
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


def test_only_full_transferred_blocks_enter_prefix_cache() -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    assert not s.probe().pool.knows(request.chain[0]), "nothing has arrived yet"
    s.complete(Fetched(fetch.operation, "transferred"))
    assert s.probe().pool.match(request.chain).tolist() == fetch.blocks[:2].tolist()
    assert s.probe().slots.num_registered[0] == 2


@pytest.mark.parametrize(("reported", "cached"), [(0, 8), (8, 8), (10, 10), (99, 12)])
def test_cached_tokens_count_hits_on_both_sides(reported: int, cached: int) -> None:
    s = scheduler()
    compute(s, here("before", 9))
    request, fetch = begin(s, elsewhere("a", 13))
    assert (fetch.job.held_blocks, len(fetch.blocks)) == (2, 1)
    s.complete(Fetched(fetch.operation, "transferred", cached=reported))
    assert request.cached_tokens == cached
    assert counters(s).fetched_tokens == 4


@pytest.mark.parametrize("outcome", FAILURES)
def test_unsuccessful_fetch_falls_back_to_local_prefill(outcome: PrefillOutcome) -> None:
    s = scheduler()
    compute(s, here("before", 5))
    request, fetch = begin(s, elsewhere("a", 11))
    s.complete(Fetched(fetch.operation, outcome, cached=8))
    plan = planned(s)
    assert (plan.starts.tolist(), plan.num_tokens.tolist()) == ([4], [7]), "after the cached prefix"
    assert (request.prefill, request.cached_tokens) == (outcome, 4)
    assert counters(s).outcomes == {outcome: 1}
    assert not counters(s).fetched_tokens
    assert not take_effects(s), "it is tried once"
    answer(s, plan)
    finish(s, request)
    assert is_idle(s)


@pytest.mark.parametrize("outcome", FAILURES)
@pytest.mark.law("3.5")
def test_blocks_of_failed_fetch_do_not_enter_prefix_cache(outcome: PrefillOutcome) -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    s.complete(Fetched(fetch.operation, outcome))
    assert not s.probe().pool.match(request.chain).tolist()
    plan = planned(s)
    assert not s.probe().pool.knows(request.chain[0]), "it is being computed"
    answer(s, plan)
    assert s.probe().pool.match(request.chain).tolist() == fetch.blocks[:2].tolist()


@pytest.mark.parametrize(("known", "length", "asks"), [(0, 4, False), (0, 5, True), (9, 12, False), (9, 13, True)])
def test_prompt_shorter_than_block_is_computed_locally(known: int, length: int, asks: bool) -> None:
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


def test_restarted_request_with_output_is_computed_locally() -> None:
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
def test_blocks_of_aborted_fetch_stay_pinned_until_it_ends(outcome: PrefillOutcome) -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    assert s.abort("a")
    assert not s.abort("a")
    (cancel,) = take_effects(s)
    assert cancel == Cancel(fetch.operation)
    assert (request.state, num_loading(s)) == (State.FINISHED, 0)
    assert (s.probe().pool.num_fenced, s.probe().pool.num_owned) == (3, 0)
    assert s.has_work, "the fetch may still write the blocks"
    s.check_integrity()
    s.add(here("b", 9))
    answer(s, planned(s))
    assert not set(s.probe().slots.owned(0).tolist()) & set(fetch.blocks.tolist())
    s.complete(Fetched(fetch.operation, outcome, cached=8))
    assert s.probe().pool.num_fenced == 0
    assert counters(s).outcomes == {"aborted": 1}
    assert not counters(s).fetched_tokens
    assert num_running(s) == 1, "the request was not resumed"
    finish(s, s.probe().requests["b"])
    assert is_idle(s)


def test_late_fetch_result_is_ignored_by_request_of_same_id() -> None:
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


def test_fetch_in_flight_does_not_block_same_prompt() -> None:
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


def test_fetched_prompt_is_shared_with_later_requests() -> None:
    s = scheduler(max_num_seqs=1)
    requests = [add(s, elsewhere(name, 11, max_tokens=1)) for name in "ab"]
    assert next_plan(s) is None
    s.complete(Fetched(fetch_of(s).operation, "transferred"))
    answer(s, planned(s))
    plan = planned(s)
    assert [admission.computed for admission in plan.admissions] == [8]
    assert [request.prefill for request in requests] == ["transferred", "held"]
    assert not take_effects(s)


def test_two_fetches_of_one_prompt_end_independently() -> None:
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


def test_request_waiting_for_local_prefill_fetches_if_it_aborts() -> None:
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


def test_salts_separate_fetched_prompts() -> None:
    s = scheduler()
    s.add(elsewhere("a", 11, salt="x"))
    s.add(elsewhere("b", 11, salt="y"))
    assert next_plan(s) is None
    assert [effect.job.cache_salt for effect in take_effects(s) if isinstance(effect, Fetch)] == ["x", "y"]
    assert num_loading(s) == 2


def test_fetching_requests_count_towards_max_num_seqs() -> None:
    s = scheduler(max_num_seqs=2)
    for index in range(3):
        s.add(elsewhere(f"r{index}", 6, first=10 * index))
    assert next_plan(s) is None
    assert len(take_effects(s)) == 2
    assert (num_loading(s), len(s.probe().waiting)) == (2, 1)


@pytest.mark.parametrize(("max_tokens", "leases"), [(1, 2), (5, 1)])
@pytest.mark.law("6.1")
def test_lease_reserves_room_for_growth_of_loading_requests(max_tokens: int, leases: int) -> None:
    s = scheduler(num_kv_blocks=10)
    s.probe().control.forecast.share = 1.0
    s.probe().control.return_cost.share = 10.0
    s.add(elsewhere("a", 16, max_tokens))
    s.add(elsewhere("b", 16, max_tokens, first=40))
    assert next_plan(s) is None
    assert len(take_effects(s)) == leases
    assert num_loading(s) == leases


def test_abort_between_arrival_and_plan_ends_on_release() -> None:
    s = scheduler()
    request, fetch = begin(s, elsewhere("a", 11))
    s.complete(Fetched(fetch.operation, "transferred"))
    assert not s.abort("a")
    plan = planned(s)
    assert [back.slot for back in plan.revocations] == [0]
    answer(s, plan)
    assert request.ended is FinishReason.ABORT
    assert is_idle(s)


def test_preempted_after_fetch_resumes_normally() -> None:
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


def test_preempted_before_first_token_does_not_refetch() -> None:
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


def test_fetch_result_without_pairing_is_a_fault() -> None:
    s = unpaired(hasher=HASHER)
    with pytest.raises(RuntimeError, match="not open"):
        s.complete(Sent(1))


# Prefill worker -----------------------------------------------------------------------------------------------


def test_settled_blocks_are_sent_once_in_order_during_prefill() -> None:
    s = scheduler(max_num_batched_tokens=4)
    request = add(s, leased("a", 11))
    sending = []
    for _ in range(3):
        plan = planned(s)
        table = s.probe().slots.owned(0)
        assert not take_effects(s), "what is in flight is not settled"
        answer(s, plan)
        sending += sends(s)
    assert request.ended is FinishReason.LENGTH
    assert [(send.first, send.blocks.tolist(), send.tokens) for send in sending] == [
        (0, [table[0]], None),
        (1, [table[1]], None),
        (2, [table[2]], 11),
    ]
    assert {send.lease for send in sending} == {"lease of a"}
    assert counters(s).sent_blocks == 3
    assert not take_effects(s), "the last send is the end; there is nothing to give up"
    for send in sending:
        s.complete(Sent(send.operation))
    assert is_idle(s)


def test_prompt_of_full_blocks_ends_with_empty_send() -> None:
    s = scheduler()
    s.add(leased("a", 8))
    answer(s, planned(s))
    first, last = sends(s)
    assert (first.first, len(first.blocks), first.tokens) == (0, 2, None)
    assert (last.first, len(last.blocks), last.tokens) == (2, 0, 8)


def test_cached_prefix_is_sent_before_computing() -> None:
    s = scheduler()
    compute(s, here("before", 9))
    s.add(leased("a", 11))
    plan = planned(s)
    (send,) = sends(s)
    assert (send.first, send.blocks.tolist(), send.tokens) == (0, s.probe().slots.owned(0)[:2].tolist(), None)
    answer(s, plan)
    (last,) = sends(s)
    assert (last.first, len(last.blocks), last.tokens, last.cached) == (2, 1, 11, 8)


def test_prefix_cached_under_another_salt_is_not_sent() -> None:
    s = scheduler()
    compute(s, here("before", 9))
    s.add(leased("a", 11, salt="other"))
    assert planned(s).num_tokens.tolist() == [11]
    assert not sends(s)


@pytest.mark.parametrize(("first", "expected"), [(1, [(1, 1), (2, 1)]), (2, [(2, 1)]), (3, [(3, 0)])])
def test_blocks_held_by_decode_worker_are_computed_but_not_sent(first: int, expected: list[tuple[int, int]]) -> None:
    s = scheduler()
    s.add(leased("a", 11, first))
    plan = planned(s)
    assert plan.num_tokens.tolist() == [11]
    table = s.probe().slots.owned(0)
    answer(s, plan)
    sending = sends(s)
    assert [(send.first, len(send.blocks)) for send in sending] == expected
    assert [block for send in sending for block in send.blocks.tolist()] == table[first:].tolist()
    assert [send.tokens for send in sending] == [*[None] * (len(sending) - 1), 11]


def test_sent_blocks_are_pinned_until_read() -> None:
    s = scheduler()
    s.add(leased("a", 11))
    answer(s, planned(s))
    first, last = sends(s)
    assert s.has_work, "the send still reads the blocks"
    assert s.probe().pool.num_fenced == 3
    s.check_integrity()
    s.complete(Sent(last.operation))
    assert s.probe().pool.num_fenced == 2
    s.complete(Sent(first.operation))
    assert is_idle(s)


def test_blocks_being_sent_stay_in_prefix_cache() -> None:
    s = scheduler()
    s.add(leased("a", 11))
    answer(s, planned(s))
    sending = sends(s)
    s.add(leased("b", 11))
    plan = planned(s)
    assert plan.num_tokens.tolist() == [3], "nothing of it is computed twice"
    assert s.probe().slots.owned(0)[:2].tolist() == [block for send in sending for block in send.blocks.tolist()][:2]
    s.check_integrity()
    for send in sending:
        s.complete(Sent(send.operation))
    answer(s, plan)
    for send in sends(s):
        s.complete(Sent(send.operation))
    assert is_idle(s)


def test_block_sent_by_two_leases_is_pinned_for_both() -> None:
    s = scheduler()
    compute(s, here("before", 5))
    for name in "ab":
        s.add(leased(name, 5))
    answer(s, planned(s))
    sending = sends(s)
    shared = [send for send in sending if send.first == 0]
    assert len(shared) == 2
    assert shared[0].blocks.tolist() == shared[1].blocks.tolist()
    s.complete(Sent(shared[0].operation))
    assert not set(shared[0].blocks.tolist()) & set(s.probe().pool._cached)
    for send in sending:
        if send is not shared[0]:
            s.complete(Sent(send.operation))
    assert is_idle(s)


def preempted_after_two_blocks(s: ContinuousBatchingScheduler) -> tuple[Request, Request]:
    """Return an old request and a leased one that was preempted after its first two blocks, both sent."""
    old = add(s, here("old", 6, 30, first=50))
    while not old.num_generated:
        answer(s, planned(s))
    request = add(s, leased("a", 16))
    for _ in range(2):
        answer(s, planned(s))
    sending = sends(s)
    assert [(send.first, len(send.blocks)) for send in sending] == [(0, 1), (1, 1)]
    for send in sending:
        s.complete(Sent(send.operation))
    preempt(s, request)
    return old, request


@pytest.mark.parametrize("forgotten", [True, False])
def test_preempted_lease_resumes_after_sent_blocks(forgotten: bool) -> None:
    s = scheduler(max_num_batched_tokens=5)
    _, request = preempted_after_two_blocks(s)
    sent = request.sent
    if forgotten:
        s.probe().pool.forget_prefixes()
    take_effects(s)
    sending: list[Send] = []
    for _ in range(8):
        plan = planned(s)
        samples = request.slot is not None and bool(plan.samples[plan.slots == request.slot].any())
        answer(s, plan)
        sending += sends(s)
        if samples:
            break
    assert request.ended is FinishReason.LENGTH
    indexes = [send.first + index for send in sending for index in range(len(send.blocks))]
    assert indexes == list(range(sent, 4))
    assert [send.tokens for send in sending if send.tokens is not None] == [16]
    assert request.preemptions == 1


def test_lease_aborted_while_waiting_is_cancelled_once() -> None:
    s = scheduler()
    s.add(leased("a", 11))
    assert s.abort("a")
    assert not s.abort("a")
    assert s.has_work, "its decode worker has not been notified yet"
    (effect,) = take_effects(s)
    assert isinstance(effect, AbandonLease)
    assert effect.lease == "lease of a"
    assert "abort" in effect.reason
    assert is_idle(s)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_failed_lease_is_cancelled_and_stops_sending(reason: FinishReason) -> None:
    s = scheduler(max_num_batched_tokens=8)
    request = add(s, leased("a", 11))
    answer(s, planned(s))
    before = sends(s)
    assert before
    finish(s, request, reason)
    (effect,) = take_effects(s)
    assert isinstance(effect, AbandonLease)
    for send in before:
        s.complete(Sent(send.operation))
    assert is_idle(s)


def test_lease_ending_while_draining_is_cancelled_once() -> None:
    """Its blocks have no owner any more, so they must not be read."""
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
    s.probe().running_batch.finish(slot, s.probe().slots.request_in(slot), FinishReason.LENGTH)
    (effect,) = take_effects(s)
    assert isinstance(effect, AbandonLease)
    s.probe().pool.answered(step.step)
    s.probe().pool.answered(plan.step)
    s.probe().running_batch.release(slot)
    assert not take_effects(s), "it is sent once"
    s.probe().pool.release(hostage, -1)


def test_sent_blocks_are_copied_from_block_table() -> None:
    s = scheduler()
    s.add(leased("a", 11))
    answer(s, planned(s))
    first, _ = sends(s)
    kept = first.blocks.copy()
    s.probe().slots.tables[:] = 0
    assert np.array_equal(first.blocks, kept)
    assert not first.blocks.flags.writeable
