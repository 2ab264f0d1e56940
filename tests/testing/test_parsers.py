"""The core's parsers pass the kit, and each wrong one fails the case that names its fault."""

import re
from itertools import product

import pytest

from fd_core.errors import PluginError
from fd_core.plugins import installed_plugins
from fd_core.testing.axes.parts import cases_of
from fd_core.testing.kit.days.account import account_of, require_as_good
from fd_core.testing.kit.law import RULES, InvariantViolated
from fd_core.testing.parsers import REASONING_PARSER, TOOL_PARSER, ParserTarget, find_parser, kit_cases, target
from fd_core.testing.parsers.answers import part_of
from fd_core.testing.parsers.day import PRIVATE, answers_of, day_of
from fd_core.testing.parsers.suite import test_day
from fd_core.testing.parsers.suite.test_calls import test_answer_with_calls as over_calls
from fd_core.testing.parsers.suite.test_reasoning import test_answer_with_reasoning as over_answers
from fd_core.text.parsing import argument_types
from fd_core.text.parsing.contract import ReasoningParser, ToolParser
from fd_core.text.parsing.formats.json_calls import HermesTools
from tests.testing.right.parsing import EmitsCharacters
from tests.testing.witnesses import check_of
from tests.testing.wrong.parsing import WRONG

KINDS = (TOOL_PARSER, REASONING_PARSER)
OVER_CASES = (over_calls, over_answers)
CASES = {kind: {str(case): case for case in kit_cases(kind) if case.function not in OVER_CASES} for kind in KINDS}
OFFERED = [
    (kind, name)
    for kind in KINDS
    for name, offer in installed_plugins().offered(kind).items()
    if not offer.entry.summary.startswith("alias of")
]


def passes(found, cases):
    for case in cases:
        try:
            case.run(target=found)
        except pytest.skip.Exception as skipped:
            assert found.name in ("deepseek_r1", "ernie45", "gpt_oss") or "one expression" in str(skipped), skipped


SIXTHS = [pytest.param(*each, number % 6, id=f"{each[0].word}-{each[1]}") for number, each in enumerate(OFFERED)]
"""The plugins read texts with the same code, and so they take turns at the cases; `nox -s soak` runs all."""


@pytest.mark.parametrize(("kind", "name", "sixth"), SIXTHS)
@pytest.mark.timeout(120)
def test_core_plugins_pass(kind, name, sixth):
    short = [case for case in CASES[kind].values() if case.section != "day"]
    passes(find_parser(name, kind), short[sixth::6])


SYNTAXES = ("qwen3_coder", "lfm2", "qwen3")
"""One plugin of each syntax of arguments that is read in a way of its own; `nox -s soak` runs all."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*each, marks=() if each[1] in SYNTAXES else pytest.mark.soak) for each in OFFERED],
)
@pytest.mark.timeout(300)
def test_core_plugins_live_an_ordinary_day(kind, name):
    """Others are compared with these two, and they with themselves: their memory is of no interest."""
    found = find_parser(name, kind)
    assert account_of(day_of(found, answers_of(found)), PRIVATE.encode(), memory=False).left == []


@pytest.mark.parametrize(("kind", "name", "sixth"), SIXTHS)
def test_core_plugins_pass_the_quick_cases(kind, name, sixth):
    found = find_parser(name, kind)
    cases, quick = cases_of(part_of(found))
    for case in cases[sixth:quick:6]:
        case.check(found, "")


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "name"), OFFERED, ids=lambda each: getattr(each, "word", each))
def test_core_plugins_pass_every_case(kind, name):
    found = find_parser(name, kind)
    passes(found, CASES[kind].values())
    for case in cases_of(part_of(found))[0]:
        case.check(found, "")


def test_characters_may_be_events_of_their_own():
    mine, core = ParserTarget("characters", EmitsCharacters, TOOL_PARSER), find_parser("qwen3_coder", TOOL_PARSER)
    days = [day_of(each, answers_of(each)[::16]) for each in (mine, core)]
    require_as_good(*map(account_of, days), "a day", "8.4", test_day.SLACK)


@pytest.mark.soak
def test_right_parser_passes():
    passes(ParserTarget("characters", EmitsCharacters, TOOL_PARSER), CASES[TOOL_PARSER].values())


@pytest.mark.slow
@pytest.mark.in_turn(8, by=lambda name: check_of(WRONG[name].noticed_by))
@pytest.mark.parametrize("name", WRONG)
def test_wrong_plugin_fails_the_case_that_names_its_fault(name):
    wrong = WRONG[name]
    kind = TOOL_PARSER if issubclass(wrong.cls, ToolParser) else REASONING_PARSER
    target = ParserTarget(name, wrong.cls, kind)
    with pytest.raises(InvariantViolated) as caught:
        if wrong.noticed_by in CASES[kind]:
            CASES[kind][wrong.noticed_by].run(target=target)
        part, (_, _, text) = part_of(target), wrong.noticed_by.partition(":")
        for case in [part.case(text)] if text else cases_of(part)[0]:
            case.part.check(target, case.values)
    assert re.fullmatch(wrong.rule, caught.value.rule), caught.value


@pytest.mark.parametrize(("kind", "name"), [(TOOL_PARSER, "qwen3_coder"), (REASONING_PARSER, "qwen3")])
def test_a_day_has_all_that_parsers_are_given(kind, name):
    answers = answers_of(find_parser(name, kind))
    axes = {axis.name: {*axis.values} for axis in part_of(find_parser(name, kind)).axes}
    drawn = {axis: {answer.case[axis] for answer in answers} for axis in ("chunk", "space", "tail")}
    assert all(values == axes[axis] for axis, values in drawn.items()), drawn
    assert {answer.end for answer in answers} >= {"finish", "flush", "cut", "leaves", "malformed"}
    if kind is REASONING_PARSER:
        assert {answer.case["begins"] for answer in answers if answer.model.prompt} == axes["begins"] - {"text"}
        return
    schemas = " ".join(answer.tools for answer in answers)
    readers = (argument_types.kinds_of, argument_types.parameter_schema, argument_types.referred)
    constants = [each for reader in readers for each in reader.__code__.co_consts[1:]]  # after the docstring
    words = {*argument_types.KINDS, *(each for each in constants if isinstance(each, str) and each.strip("~01/#"))}
    assert not [word for word in words if f'"{word}"' not in schemas]
    around = [re.escape(f'{{"{word}": [') for word in ("anyOf", "oneOf", "allOf")]
    inner = [*around, re.escape('{"$ref"')]
    assert all(re.search(outer + each, schemas) for outer, each in product(around, inner))
    values = [value for answer in answers for _, called, _ in answer.model.calls for value in called.values()]
    assert {argument_types.kind_of(value) for value in values} == argument_types.KINDS
    assert {*[0, 1, 2]} <= {len(answer.model.calls) for answer in answers}


def test_each_case_is_needed_by_a_wrong_plugin():
    named = {wrong.noticed_by.partition(":")[2].partition("[")[0] for wrong in WRONG.values()}
    assert {case.function.__name__ for cases in CASES.values() for case in cases.values()} <= named


def test_every_rule_of_parsers_has_a_case():
    rules = {rule for kind in KINDS for case in kit_cases(kind) for rule in case.rules}
    assert {rule for rule in RULES if rule.startswith("8.")} <= rules


class WithoutSample(ToolParser):
    """A parser without a sample and without an output constraint."""

    push = flush = None


class WithoutSampleAnswer(ReasoningParser):
    sample = "<think>Hm.</think>"
    push = flush = None


@pytest.mark.parametrize(
    ("cls", "kind", "words"),
    [
        (WithoutSample, TOOL_PARSER, "the sample of the tool parser mine lacks 'weather'"),
        (WithoutSampleAnswer, REASONING_PARSER, "the sample of the reasoning parser mine lacks 'I look.'"),
        (type("HasAForm", (HermesTools,), {"sample": "CALL weather in Rome"}), TOOL_PARSER, "lacks 'now'"),
    ],
)
def test_parser_without_samples_is_rejected(monkeypatch, cls, kind, words):
    monkeypatch.setattr(target, "installed_plugins", lambda: Offering(cls))
    with pytest.raises(PluginError, match=re.escape(words)):
        find_parser("mine", kind)


class Offering:
    """Plugin registry that offers one class under every name."""

    def __init__(self, cls):
        self.load = lambda kind, name: cls
