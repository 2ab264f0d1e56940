"""The core's scheduler passes the kit, and each wrong one fails the case that names its fault."""

import contextlib
import inspect
import re
import typing
from collections import deque

import pytest

from fd_core.config import Limits
from fd_core.config.envelope import OperatingEnvelope
from fd_core.effects import operations
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.testing.axes.parts import cases_of
from fd_core.testing.kit.law import RULES, InvariantViolated
from fd_core.testing.report.model import OF_OTHERS_THAN_SCHEDULERS
from fd_core.testing.schedulers import SchedulerTarget, find_scheduler, kit_cases
from fd_core.testing.schedulers.cases import SCHEDULES, SIZES, check_schedule
from fd_core.testing.schedulers.day import SERVERS, ServerDay
from fd_core.testing.schedulers.twins import reusing_ids
from tests.testing.right.scheduling import (
    SHORT_DAY,
    AdmitsBatches,
    CompilesAGrammarOnce,
    HasOneSlot,
    TakesTheLastSlot,
)
from tests.testing.witnesses import check_of
from tests.testing.wrong import planning, scheduling

pytestmark = pytest.mark.slow

CASES = {str(case): case for case in kit_cases()}
MODULES = (scheduling, planning)
"""Each adds its wrong schedulers."""
WRONG = scheduling.WRONG
PARTS = {part.name: part for part in (SCHEDULES, SIZES)}
LONG = "lifetime:test_counters_grow_beyond_sixteen_bits"
_NOT_IN_DAYS = {
    "vocab_size": "no scheduler reads it",
    "num_stages": "steps in flight are `pipeline_depth`",
    "whole_prompts": "encoders",
    "groups": "models with windows",
    "max_image_tokens": "models with images",
    "whole_images": "models with images",
}
LATER = [
    LONG,
    *(f"cases:test_{part.name}[{case}]" for part in PARTS.values() for case in cases_of(part)[0][cases_of(part)[1] :]),
]
"""Run in `nox -s soak` only: most cases of the parts."""
DAYS = [name for name in CASES if ":test_an_ordinary_day[" in name]
"""By default a scheduler of another kind lives a short one; that of the core, which would be compared with itself,
lives some without an account of its memory, below and in the tests of time."""
TIMED = [name for name in CASES if ":test_a_step_of_" in name or ":test_time_of_" in name]


@pytest.mark.timeout(400)
@pytest.mark.in_turn(3, by=lambda name: check_of(name))
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.soak if name in (*LATER, *DAYS) else pytest.mark.timing if name in TIMED else ()
        )
        for name in CASES
    ],
)
def test_continuous_scheduler_passes(name: str) -> None:
    CASES[name].check(find_scheduler("continuous"))


OTHER = [name for name in CASES if name not in LATER and name not in TIMED]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if at % 2 or name in DAYS else ()) for at, name in enumerate(OTHER)],
)
def test_scheduler_of_another_kind_passes(name: str) -> None:
    CASES[name].check(SchedulerTarget("last slot", TakesTheLastSlot))


def test_scheduler_of_another_kind_has_a_short_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVERS, "crowded", SHORT_DAY)
    CASES["day:test_an_ordinary_day[crowded]"].check(SchedulerTarget("last slot", TakesTheLastSlot))


@pytest.mark.parametrize("cls", [HasOneSlot, AdmitsBatches])
def test_arrivals_are_checked_of_schedulers_that_run_one_request(cls: type[Scheduler]) -> None:
    CASES["budget:test_requests_that_arrive_one_by_one_run_at_once"].check(SchedulerTarget(cls.__name__, cls))


@pytest.mark.parametrize("incident", ["none", "abort_waiting", "abort_first", "abort_all"])
@pytest.mark.parametrize("grammar", ["own", "shared"])
def test_scheduler_that_compiles_a_grammar_once_passes(incident: str, grammar: str) -> None:
    case = SCHEDULES.case(f"grammar={grammar},incident={incident},requests=12,slots=2")
    check_schedule(SchedulerTarget("once", CompilesAGrammarOnce), case.values)


def test_scheduler_is_not_tested_beyond_its_envelope() -> None:
    for name, case in CASES.items():
        if name.startswith("budget:"):
            with contextlib.suppress(pytest.skip.Exception):
                case.check(SchedulerTarget("one slot", HasOneSlot))


def test_every_rule_of_schedulers_has_a_case() -> None:
    of_schedulers = {rule for rule in RULES if rule[0] in "123456"} - OF_OTHERS_THAN_SCHEDULERS.keys()
    assert of_schedulers <= {rule for case in CASES.values() for rule in case.rules} <= set(RULES)


@pytest.mark.in_turn(8, by=lambda name: check_of(WRONG[name].noticed_by))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if WRONG[name].noticed_by == LONG else ()) for name in WRONG]
)
def test_wrong_plugin_fails_the_case_that_names_its_fault(name: str) -> None:
    wrong = WRONG[name]
    target = SchedulerTarget(name, wrong.cls)
    with pytest.raises(InvariantViolated) as caught:
        if wrong.noticed_by in CASES:
            CASES[wrong.noticed_by].check(target)
        else:
            part, _, case = wrong.noticed_by.partition(":")
            check_schedule(target, PARTS[part].case(case).values)
    assert caught.value.rule == wrong.rule, caught.value


@pytest.mark.parametrize("name", PARTS)
def test_cases_reach_the_edge_of_an_envelope_and_nothing_beyond(name: str) -> None:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "max_model_len": 90, "block_size": 16, "max_drafts": 2}
    part = PARTS[name].within(OperatingEnvelope(**limits, pipeline_depth=4))
    sizes = [part.sizes(case.values) for case in cases_of(part)[0]]
    assert {name: max(each[name] for each in sizes) for name in limits} == limits


def test_wrong_schedulers_cover_every_section() -> None:
    assert len(WRONG) >= 80
    assert {rule[0] for rule in RULES} - {"7"} == {wrong.rule[0] for wrong in WRONG.values()}


class _Constructed(Exception):
    """Stands for a scheduler that needs not run."""


def test_days_vary_every_setting_of_a_scheduler() -> None:
    setups = list[SchedulerSetup]()

    def make(setup: SchedulerSetup) -> Scheduler:
        setups.append(setup)
        raise _Constructed

    for server in SERVERS.values():
        with contextlib.suppress(_Constructed):
            next(ServerDay(server, make).live())
    settings = [each for of in (SchedulerSetup, Limits) for each in inspect.signature(of).parameters]
    found = [{each: getattr(setup, each, getattr(setup.limits, each, None)) for each in settings} for setup in setups]
    constant = {name for name in found[0] if len({repr(each[name]) for each in found}) == 1}
    assert constant == {*_NOT_IN_DAYS}


@pytest.mark.parametrize("name", ["store", "pairs"])
def test_days_begin_every_operation(name: str) -> None:
    day = ServerDay(SERVERS[name], find_scheduler("continuous").make)
    deque(day.live(), maxlen=0)
    begun = {kind for kind in typing.get_args(operations.Effect) if day.tiers.begun[kind]}
    of_pairs = {operations.Fetch, operations.Send, operations.AbandonLease}
    of_stores = {operations.Lookup, operations.Load, operations.Save}
    assert begun - {operations.Cancel} == (of_stores if name == "store" else of_pairs) | {operations.CompileGrammar}


def test_reused_ids_reach_every_method_of_the_contract_with_ids():
    """A method that takes or returns the id of a request, by itself or in a request, a plan or a delta."""
    signatures = {name: inspect.signature(method) for name, method in vars(Scheduler).items() if callable(method)}
    carry = re.compile("request_id|RequestSpec|RequestActivity|StepPlan|Delta")
    named = {name for name, signature in signatures.items() if carry.search(f"{name}{signature}")}
    assert named >= {"add", "abort", "plan", "commit", "complete", "request_ids", "phases", "activities"}
    assert named - vars(reusing_ids(None).func).keys() == set()
