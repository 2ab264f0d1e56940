"""Calls: names and arguments of every kind, and calls forced by a grammar."""

from __future__ import annotations

import json
from itertools import product

import pytest

from fd_core.testing.axes.parts import KitCase
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.parsers.answers import CALLS, TEXTS
from fd_core.testing.parsers.target import ParserTarget, meaning_of
from fd_core.text.parsing.contract import CallForm, TaggedArguments

NAMES = ["w", "now_and_then", "get.weather-2_x", "x" * 64]
"""Valid names: one is a single letter, and one is a prefix of another."""

TYPES = ["integer", "number", "boolean", "null", "array", "object", ["integer", "string"]]
NO_JSON = [
    "NaN",
    "-Infinity",
    "1e999",
    "1_000",
    "007",
    "0x1F",
    "\u0663",
    ".5",
    "tru",
    "[1, NaN]",
    "{'a': 1}",
    "12 m",
    "",
]
"""Values that are no JSON, most of which functions of Python take for numbers."""


def form_of(target: ParserTarget, name: str) -> CallForm:
    """Return the form of a call; skip the test if the format has none."""
    form = target.form(name)
    return lacks("its `form` is None: a grammar cannot force calls") if form is None else form


@pytest.mark.law("8.3")
@pytest.mark.parametrize("name", NAMES)
def test_a_trigger_begins_each_call_and_no_text(target: ParserTarget, name: str) -> None:
    """A grammar forces a call where the trigger is."""
    form = form_of(target, name)
    begun = form.trigger and (form.opening or form.begin).startswith(form.trigger)
    require(begun, "8.3", f"a call does not begin with {form.trigger!r}: {form}")
    ordinary = [text for text in TEXTS.values() if form.anywhere and form.trigger in text]
    what = f"the trigger {form.trigger!r} is in the text {ordinary[:1]}, where a grammar would force a call"
    require(not ordinary, "8.3", f"{what}; choose a prefix that only calls have")


@pytest.mark.law("8.3")
def test_ended_calls_have_json_arguments_whatever_the_model_writes(target: ParserTarget) -> None:
    """Write values that are no JSON for arguments of each type."""
    form = form_of(target, "weather")
    tagged = form.arguments
    if not isinstance(tagged, TaggedArguments):
        lacks("its arguments are one expression, which is passed on as the model writes it")
    for kind, value in product(TYPES, NO_JSON):
        argument = f"{tagged.before_key}city{tagged.before_value}{value}{tagged.after_value}"
        text = form.opening + form.begin + argument + form.end + form.closing
        tools = {"weather": {"type": "object", "properties": {"city": {"type": kind}}}}
        found = meaning_of(target.read(text, tools=tools))
        for _, arguments in found.calls[: found.ended]:
            try:
                json.loads(arguments, parse_constant=_refuse)
            except ValueError:
                broken("8.3", f"arguments {arguments!r} of a call that has an end are not JSON, in {text!r}")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@pytest.mark.law("8.1", "8.3", "8.4")
@pytest.mark.fd_cases(CALLS)
def test_answer_with_calls(target: ParserTarget, case: KitCase) -> None:
    case.check(target, f"fdcore conformance --tool-parser {target.name}")
