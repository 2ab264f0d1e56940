"""Grammars that do not compile are rejected with the reason, as are those whose first mask fails."""

from __future__ import annotations

import pytest

from fd_core.structured import grammar
from fd_core.structured.compiler import GrammarError
from tests.structured.bytewise import bytes_compiler

ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (grammar.context_free("start: missing"), "unknown name"),
        (grammar.context_free("start: start"), "allows no further token"),
        (grammar.regex(r"[^\s\S]"), "allows no further token"),
        (grammar.json_schema({"$ref": "#"}), "allows no further token"),
        (grammar.json_schema(ENDLESS), "Too many items"),
        (grammar.json_schema({"type": "array", "minItems": 10**9, "items": {"type": "null"}}), "Too many items"),
    ],
    ids=["unknown rule", "circle", "empty regex", "schema of itself", "endless object", "endless list"],
)
def test_grammar_that_no_text_can_begin_with_is_rejected(text: str, words: str) -> None:
    compiler = bytes_compiler()
    with pytest.raises(GrammarError, match=words):
        compiler.matcher(text)
    assert words in (compiler.refusal(text) or "")
    assert (compiler.stats().compiled, compiler.stats().refused) == (1, 1)


def test_grammar_that_allows_only_empty_text_can_be_used() -> None:
    assert bytes_compiler().matcher(grammar.regex("a?")) is not None
    assert bytes_compiler().refusal(grammar.context_free('start: ""')) is None


def test_reason_names_the_place_without_repeating_the_grammar() -> None:
    reason = bytes_compiler().refusal(grammar.context_free("start: a\na: missing"))
    assert reason is not None and "missing" in reason and "|" not in reason and "start" not in reason
