"""Grammars that would take seconds to compile are rejected, with their field, before anything is compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from fd_core.errors import BadRequest
from fd_core.structured import grammar
from fd_core.structured.schemas import MAX_OPTIONAL, MAX_REPEATS
from tests.speed import slowdown

CATASTROPHE = "^(a{1000}){1000}$"
MANY = {f"p{index}": {} for index in range(3000)}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: grammar.regex(CATASTROPHE), "regex"),
        (lambda: grammar.regex(f"a{{{MAX_REPEATS + 1}}}"), "regex"),
        (lambda: grammar.regex("((a{40}b){40}|[)]){40}"), "regex"),
        (lambda: grammar.regex("(a{300}){300,}"), "regex"),
        (lambda: grammar.context_free(f"start: /{CATASTROPHE}/"), "grammar"),
        (lambda: grammar.json_schema({"anyOf": [{"pattern": CATASTROPHE}]}), "json_schema.anyOf[0].pattern"),
        (lambda: grammar.json_schema({"patternProperties": {CATASTROPHE: {}}}), "json_schema.patternProperties"),
        (lambda: grammar.json_schema({"items": {"properties": MANY}}), "json_schema.items.properties"),
        (
            lambda: grammar.structural_tag({"format": {"type": "regex", "pattern": CATASTROPHE}}),
            "structural_tag.format.pattern",
        ),
    ],
)
@pytest.mark.timing
def test_slow_grammar_is_rejected_within_milliseconds(make: Callable[[], Any], field: str) -> None:
    began = time.thread_time()
    with pytest.raises(BadRequest, match="at most") as raised:
        make()
    assert raised.value.field == field
    assert time.thread_time() - began < 0.25 * slowdown()


def test_grammar_within_the_limits_is_accepted() -> None:
    grammar.regex(r"(a{200}b{200}){200}\{9999999}[{99999999}]\p{Greek}{9}")
    grammar.regex(r"(a{900}){50}|(b{900}){50}")
    grammar.json_schema({"properties": dict(list(MANY.items())[:MAX_OPTIONAL])})
    grammar.json_schema({"properties": MANY, "required": list(MANY)})
