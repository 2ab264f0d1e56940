"""Contents of plans: budget, blocks, admission and preemption."""

from __future__ import annotations

import pytest

from fd_core.effects.operations import (
    NO_EFFECTS,
    Cancel,
    Found,
    Load,
    Loaded,
    LoadPaceMeasured,
    Lookup,
    PrefillPaceMeasured,
)
from fd_core.errors import BadRequest
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.types import Delta, FinishReason, RequestSpec, SamplingParams
from tests.scheduling.driving import (
    HASHER,
    add,
    answer,
    num_loading,
    num_running,
    output_of,
    planned,
    scheduler,
    spec,
    take_effects,
)


def test_prefill_is_chunked_to_budget_and_samples_at_end() -> None:
    s = scheduler(max_num_batched_tokens=4)
    s.add(spec("a", length=10))
    chunks = []
    for _ in range(3):
        plan = planned(s)
        chunks.append((plan.starts.tolist(), plan.num_tokens.tolist(), plan.samples.tolist()))
        answer(s, plan)
    assert chunks == [([0], [4], [False]), ([4], [4], [False]), ([8], [2], [True])]


def test_decodes_are_planned_before_prefills() -> None:
    s = scheduler(max_num_batched_tokens=8)
    s.add(spec("a"))
    answer(s, planned(s))
    s.add(spec("b", length=20))
    plan = planned(s)
    assert plan.num_tokens.tolist() == [1, 7]


def test_budget_equal_to_decode_demand_alternates_with_prefill() -> None:
    """The second decode starts from a load, which needs no budget, during the prefill."""
    s = scheduler(max_num_batched_tokens=2, hasher=HASHER, keep_kv=OffloadSelection())
    s.add(spec("decodes", length=1, max_tokens=20))
    answer(s, planned(s))
    add(s, spec("loads", length=5, max_tokens=20, first=50))
    add(s, spec("prefills", length=20, first=70))
    for effect in take_effects(s):
        assert isinstance(effect, Lookup)
        stored = 1 if len(effect.keys) == 1 else 0
        s.complete(Found(effect.operation, stored, stored))
    answer(s, planned(s))
    (load,) = take_effects(s)
    assert isinstance(load, Load)
    s.complete(Loaded(load.operation, 1))
    assert (num_running(s), num_loading(s)) == (3, 0)
    served: list[int] = []
    for _ in range(9):
        plan = planned(s)
        served += plan.slots.tolist()
        answer(s, plan)
    assert (len(served), min(served.count(slot) for slot in range(3))) == (18, 6)


@pytest.mark.law("2.4")
def test_preemption_needs_no_budget() -> None:
    s = scheduler(max_num_batched_tokens=2)
    for name in "abc":
        s.add(spec(name, length=1))
    answer(s, planned(s))
    s.abort("b")
    s.add(spec("d", length=10))
    plan = planned(s)
    assert [back.slot for back in plan.revocations] == [1]
    assert plan.total_tokens == 2


def test_block_shortage_preempts_only_the_youngest() -> None:
    s = scheduler(num_kv_blocks=10, max_num_seqs=3)
    for index, name in enumerate("abc"):
        s.add(spec(name, length=4, max_tokens=30, first=10 * index))
    victims: list[int] = []
    while not victims:
        plan = planned(s)
        victims = [back.slot for back in plan.revocations]
        assert not (victims and plan.admissions), "a pass that preempted admits no request"
        answer(s, plan)
    assert victims == [2]
    s.check_integrity()


@pytest.mark.law("2.1")
def test_cached_prefix_is_free_except_last_token() -> None:
    s = scheduler(hasher=HASHER)
    s.add(spec("a", length=8))
    answer(s, planned(s))
    s.add(spec("b", length=8))
    plan = planned(s)
    row = plan.slots.tolist().index(1)
    assert (plan.starts[row], plan.num_tokens[row]) == (4, 4)


def test_prompt_filling_context_is_rejected_with_limits() -> None:
    with pytest.raises(BadRequest, match=r"40 tokens.*is 40"):
        scheduler().add(spec("a", length=40))


def test_decisions_of_add_and_abort_are_returned_once() -> None:
    s = scheduler(hasher=HASHER, keep_kv=OffloadSelection())
    (lookup,) = s.add(spec("a")).operations
    assert isinstance(lookup, Lookup)
    assert s.plan() == (None, NO_EFFECTS), "it is returned once"
    s.complete(Found(lookup.operation, 0, 0))
    plan, effects = s.plan()
    assert plan is not None
    assert effects is NO_EFFECTS
    (other,) = s.add(spec("b", first=50)).operations
    s.abort("b")
    _, effects = s.commit(plan, output_of(s, plan))
    assert effects.operations == (Cancel(other.operation),)
    assert s.has_work


def test_abort_of_waiting_request_ends_it_immediately() -> None:
    s = scheduler()
    s.add(spec("a"))
    assert s.abort("a") == Delta("a", finish_reason=FinishReason.ABORT)
    assert s.abort("a") is None
    assert (s.has_work, s.request_ids(), s.plan()) == (False, [], (None, NO_EFFECTS))
    assert s.stats().outputs.finished[FinishReason.ABORT] == 1


@pytest.mark.law("1.7")
def test_abort_of_running_request_ends_it_on_release() -> None:
    s = scheduler()
    s.add(spec("a"))
    answer(s, planned(s))
    assert s.abort("a") is None
    assert answer(s, planned(s)) == [Delta("a", finish_reason=FinishReason.ABORT)]
    assert not s.has_work


def test_load_or_recompute_decision_is_returned_once() -> None:
    s = scheduler(hasher=HASHER, keep_kv=OffloadSelection())
    s.add(spec("a", length=9))
    s.plan()
    s.complete(PrefillPaceMeasured(0.001))
    s.complete(LoadPaceMeasured(host_block=1.0))
    s.complete(Found(1, 2, 2))
    plan, effects = s.plan()
    assert plan is not None
    (decision,) = effects.decisions
    assert (decision.request_id, decision.load, decision.num_tokens) == ("a", False, 8)
    assert s.commit(plan, output_of(s, plan))[1] == NO_EFFECTS


def test_prefix_cache_events_are_returned_once() -> None:
    s = scheduler(hasher=HASHER, kv_events=True)
    s.add(spec("a", length=9, max_tokens=1))
    plan, effects = s.plan()
    assert plan is not None
    assert not effects.events
    _, effects = s.commit(plan, output_of(s, plan))
    assert len(effects.events) == 1
    assert s.plan() == (None, NO_EFFECTS)
    s.probe().pool.forget_prefixes()
    assert len(s.plan()[1].events) == 1


def test_empty_prompt_is_rejected() -> None:
    with pytest.raises(BadRequest, match="no tokens"):
        scheduler().add(spec("a", length=0))


@pytest.mark.law("2.1", "1.5")
def test_loading_slot_ignores_drafts_of_previous_gen() -> None:
    s = scheduler(
        max_num_seqs=1,
        max_drafts=3,
        hasher=HASHER,
        drafts=DraftControl(1, 3, cheap_tokens=100),
        keep_kv=OffloadSelection(),
    )
    s.add(spec("a", length=1, max_tokens=8))
    first, second = planned(s), planned(s)
    s.commit(first, output_of(s, first, errors=((0, "its row failed"),)))
    (lookup,) = s.add(spec("b", length=9, first=50)).operations
    s.complete(Found(lookup.operation, 2, 2))
    assert s.plan()[0] is None
    assert s.held().loading == 1
    s.commit(second, output_of(s, second, drafts_ready=3))
    assert s.probe().slots.drafts_ready.tolist() == [0]


@pytest.mark.law("8")
def test_plan_arrays_are_read_only() -> None:
    s = scheduler()
    s.add(spec("a"))
    plan = planned(s)
    columns = (plan.slots, plan.gens, plan.starts, plan.num_tokens, plan.num_drafts, plan.samples)
    assert not any(column.flags.writeable for column in columns)


def test_new_request_in_slot_is_not_charged_for_old_drafts() -> None:
    s = scheduler(max_num_seqs=1, max_drafts=3, drafts=DraftControl(1, 3, cheap_tokens=100))
    s.add(spec("a", length=1, max_tokens=1))
    first = planned(s)
    s.commit(first, output_of(s, first, drafts_ready=3))
    s.add(spec("b", length=1, max_tokens=8, first=50))
    plan = planned(s)
    assert (plan.num_tokens.tolist(), s.probe().slots.drafts_ready.tolist()) == ([1], [0])


@pytest.mark.law("3.3")
def test_matched_prefix_is_not_evicted_for_its_own_request() -> None:
    s = scheduler(hasher=HASHER, num_kv_blocks=10, max_num_batched_tokens=32)
    s.add(spec("a", length=17, max_tokens=1))
    answer(s, planned(s))
    assert (s.probe().pool.num_cached, s.probe().pool.num_free) == (4, 10)
    s.add(spec("other", length=23, first=50))
    s.add(spec("again", length=19))
    plan = planned(s)
    assert len(plan.admissions) == 1, "only its own prefix is left for the second request, so it waits"
    assert s.probe().pool.num_cached == 4
    s.check_integrity()


def test_pipelined_plans_split_the_requests() -> None:
    s = scheduler(pipeline_depth=2, num_stages=2, max_num_batched_tokens=40)
    for name in "abcd":
        s.add(spec(name, length=1, max_tokens=30))
    s.commit(first := planned(s), output_of(s, first))
    rows = []
    flying = [planned(s), planned(s)]
    for _ in range(6):
        assert s.plan()[0] is None, "every token is in flight"
        rows.append([plan.slots.tolist() for plan in flying])
        s.commit(flying[0], output_of(s, flying.pop(0)))
        flying.append(planned(s))
    assert rows == 3 * [[[0, 1], [2, 3]], [[2, 3], [0, 1]]]


@pytest.mark.parametrize(("stages", "count"), [(4, 5), (4, 9), (4, 17), (3, 7), (8, 9)])
def test_no_pipelined_plan_has_two_requests_more_than_another(stages: int, count: int) -> None:
    room = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "max_model_len": 200, "num_kv_blocks": 900}
    made = scheduler(pipeline_depth=stages, num_stages=stages, **room)
    for number in range(count):
        made.add(spec(str(number), length=1, max_tokens=100 if number else 12))
    made.commit(first := planned(made), output_of(made, first))
    flying = [planned(made) for _ in range(stages)]
    for _ in range(20 * stages):
        made.commit(flying[0], output_of(made, flying.pop(0)))
        flying.append(planned(made))
    assert num_running(made) == count - 1
    rows = [len(plan.slots) for plan in flying]
    assert max(rows) - min(rows) <= 1, rows


def test_pipelined_prompt_chunks_overlap() -> None:
    s = scheduler(pipeline_depth=2, num_stages=2, max_num_batched_tokens=8)
    s.add(spec("a", length=20))
    chunks = [planned(s), planned(s), planned(s)]
    assert [plan.num_tokens.tolist() for plan in chunks] == [[8], [8], [4]]
    assert s.plan()[0] is None


@pytest.mark.parametrize("token", [7, 8, 9, 30, 31])
def test_each_eos_and_stop_id_ends_a_text(token):
    made = scheduler()
    params = SamplingParams(max_tokens=8, stop_token_ids=(30, 31))
    add(made, RequestSpec(request_id="a", prompt=(1, 2), params=params, eos_token_ids=(7, 8, 9)))
    (delta,) = answer(made, planned(made), token)
    assert (delta.token_ids, delta.finish_reason) == ((token,), FinishReason.STOP)


@pytest.mark.parametrize("aborted", [False, True])
def test_expired_prefix_wait_is_forgotten(aborted):
    made = scheduler(hasher=HASHER)
    expired = made._admission_planner._prefix_wait_expired
    expired.add(add(made, spec("a")).arrival)
    if aborted:
        made.abort("a")
    else:
        planned(made)
    assert not expired
