"""A request waits for its grammar as it does for stored KV, without blocking others."""

from __future__ import annotations

import pytest

from fd_core.effects.operations import Cancel, CompileGrammar, Found, GrammarReady, Lookup
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.requests import State
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.types import FinishReason, RequestSpec, SamplingParams
from tests.scheduling.driving import add, answer, next_plan, planned, take_effects
from tests.scheduling.waiting.test_admission_planner import scheduler


def spec(name: str, grammar: str | None = "g", length: int = 20, first: int = 0) -> RequestSpec:
    params = SamplingParams(max_tokens=60, grammar=grammar)
    return RequestSpec(request_id=name, prompt=tuple(range(first, first + length)), params=params)


def operation(s: ContinuousBatchingScheduler) -> int:
    (effect,) = take_effects(s)
    assert isinstance(effect, CompileGrammar)
    return effect.operation


def test_request_waits_for_its_grammar_without_blocking_others() -> None:
    s = scheduler()
    waiting = add(s, spec("waiting"))
    compiling = operation(s)
    plain = add(s, spec("plain", None, first=50))
    plan = planned(s)
    assert [admission.request_id for admission in plan.admissions] == ["plain"]
    assert (waiting.state, plain.state, s.has_work) == (State.WAITING, State.RUNNING, True)
    assert s.complete(GrammarReady(compiling)) is None
    assert [admission.request_id for admission in planned(s).admissions] == ["waiting"]


def test_request_waits_for_kv_and_grammar_in_any_order() -> None:
    for grammar_first in (True, False):
        s = scheduler(keep=OffloadSelection())
        add(s, spec("both"))
        compiling, lookup = take_effects(s)
        assert isinstance(compiling, CompileGrammar) and isinstance(lookup, Lookup)
        ends = [GrammarReady(compiling.operation), Found(lookup.operation, 0, 0)]
        for end in ends if grammar_first else reversed(ends):
            assert next_plan(s) is None
            s.complete(end)
        assert planned(s).admissions


def test_invalid_grammar_ends_only_its_request() -> None:
    s = scheduler()
    add(s, spec("bad"))
    compiling = operation(s)
    add(s, spec("good", "h", first=50))
    good = operation(s)
    end = s.complete(GrammarReady(compiling, "unknown name: foo"))
    assert end is not None and (end.request_id, end.finish_reason) == ("bad", FinishReason.ERROR)
    assert end.error == "its grammar cannot be used: unknown name: foo"
    assert s.request_ids() == ["good"]
    s.complete(GrammarReady(good))
    assert [admission.request_id for admission in planned(s).admissions] == ["good"]
    assert s.stats().outputs.finished[FinishReason.ERROR] == 1


def test_abort_cancels_compilation_and_ignores_its_result() -> None:
    s = scheduler()
    add(s, spec("left"))
    compiling = operation(s)
    end = s.abort("left")
    assert end is not None and end.finish_reason is FinishReason.ABORT
    assert take_effects(s) == [Cancel(compiling)]
    assert s.has_work, "the operation is not over"
    assert s.complete(GrammarReady(compiling, "too late")) is None
    assert s.held().idle


def test_preempted_request_waits_for_its_grammar_again() -> None:
    s = scheduler(num_kv_blocks=12)
    for name, first in (("old", 0), ("young", 50)):
        add(s, spec(name, "g", first=first))
        s.complete(GrammarReady(operation(s)))
    for _ in range(100):
        answer(s, planned(s))
        if s.stats().counters.preemptions:
            break
    for _ in range(100):
        effects = [effect for effect in take_effects(s) if isinstance(effect, CompileGrammar)]
        if effects:
            break
        answer(s, planned(s))
    assert len(effects) == 1
    assert s.probe().requests["young"].compiling == effects[0].operation


@pytest.mark.law("2.1")
def test_only_grammar_requests_reserve_draft_tokens() -> None:
    s = scheduler(max_drafts=8, pipeline_depth=2, drafts=DraftControl(4, 8, 64, drafter=False))
    for name, grammar in (("free", None), ("bound", "g")):
        add(s, spec(name, grammar, length=8, first=0 if grammar else 50))
        if grammar:
            s.complete(GrammarReady(operation(s)))
    first = planned(s)
    assert len(first.slots) == 2
    second = planned(s)
    requests = s.probe().requests
    drafts = dict(zip(second.slots.tolist(), second.num_drafts.tolist(), strict=True))
    free, bound = requests["free"].slot, requests["bound"].slot
    assert free is not None and bound is not None
    assert drafts[free] == 0 < drafts[bound]
