"""Requested output constraints become equivalent grammars, or an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fd_core.errors import BadRequest
from fd_core.structured import grammar
from tests.structured.bytewise import BYTES, END_ID, allowed, ids, matcher


def accepts(text: str, made: str) -> bool:
    """Return True if the text matches as a whole."""
    follow = matcher(made)
    tokens = ids(text)
    return follow.allowed([*tokens, END_ID]) == len(tokens) + 1


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_schema_gives_one_line_json_in_property_order() -> None:
    made = grammar.json_schema(PERSON)
    assert accepts('{"name": "Ada", "age": 36}', made)
    for other in ('{"age": 36, "name": "Ada"}', '{"name":"Ada","age":36}', '{"name": "Ada"}', "[]"):
        assert not accepts(other, made), other


def test_whitespace_may_be_requested() -> None:
    made = grammar.json_schema(PERSON, whitespace_pattern=r"[ \n]{0,2}")
    assert accepts('{\n"name":\n"Ada",  "age":36 }', made)
    assert not accepts('{   "name":"Ada","age":36}', made)


def test_any_object() -> None:
    made = grammar.json_schema({"type": "object"})
    assert accepts('{"a": [1, null, {"b": "c"}], "d": true}', made)
    assert accepts("{}", made)
    assert not accepts("[1]", made)


def test_regex_matches_the_whole_text() -> None:
    made = grammar.regex("[a-c]+d?")
    assert accepts("abcd", made) and accepts("a", made)
    assert not accepts("abcde", made) and not accepts("d", made)


CHOICES = ['say "no"', "back\\slash", "new\nline", "\x00\x7f\x9f", "é你\U0001f600", "<|end|>", "a/b", ""]


def test_choices_are_literal() -> None:
    made = grammar.choice(CHOICES)
    for text in CHOICES:
        tokens = [BYTES.byte_table.index(bytes([byte])) for byte in text.encode()]
        assert matcher(made).allowed([*tokens, END_ID]) == len(tokens) + 1, repr(text)
    assert not accepts("say", made)


def test_lark_and_gbnf() -> None:
    assert accepts("ab", grammar.context_free('start: "a" b\nb: "b" | "c"'))
    assert accepts("ab", grammar.context_free('root ::= "a" b\nb ::= "b" | "c"'))
    assert not accepts("aa", grammar.context_free('root ::= "a" b\nb ::= "b" | "c"'))


def test_free_text_with_a_constrained_part() -> None:
    structures = [{"begin": "<call=f>", "schema": PERSON, "end": "</call>"}]
    made = grammar.structural_tag({"structures": structures, "triggers": ["<call="]})
    assert accepts("well, nothing", made)
    assert accepts('so <call=f>{"name": "x", "age": 1}</call> then', made)
    assert not accepts("so <call=g>", made)
    tags = [{"begin": "<call=f>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</call>"}]
    newer = {"format": {"type": "triggered_tags", "tags": tags, "triggers": ["<call="]}}
    assert accepts('so <call=f>{"name": "x", "age": 1}</call> then', grammar.structural_tag(newer))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def tag_of(structure: Any) -> dict[str, Any]:
    return {"structures": [structure], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("make", "field", "words"),
    [
        (lambda: grammar.json_schema({"const": "x" * 200_000}), "json_schema", "at most 131,072"),
        (lambda: grammar.json_schema(nested(100)), "json_schema", "nested deeper than 64"),
        (lambda: grammar.json_schema(nested(90_000)), "json_schema", "nested deeper than 64"),
        (lambda: grammar.json_schema({"const": float("nan")}), "json_schema", "not JSON"),
        (lambda: grammar.json_schema([]), "json_schema", "JSON object, got list"),  # type: ignore[arg-type]
        (
            lambda: grammar.json_schema({"anyOf": [{"multipleOf": 991}, {"multipleOf": 9.97}]}),
            "json_schema.anyOf[1].multipleOf",
            "too many states",
        ),
        (lambda: grammar.regex("x" * 200_000), "regex", "at most"),
        (lambda: grammar.regex(""), "regex", "is empty"),
        (lambda: grammar.choice([]), "choice", "0 choices"),
        (lambda: grammar.choice(["x"] * 5000), "choice", "5000 choices"),
        (lambda: grammar.context_free("root ::= " + "(" * 5000 + ")" * 5000), "grammar", "nested deeper"),
        (lambda: grammar.context_free("root ::= other"), "grammar", "'other' not found"),
        (lambda: grammar.context_free('root ::= "\\'), "grammar", "is invalid"),
        (lambda: grammar.structural_tag({}), "structural_tag.structures", "list of 1 to"),
        (
            lambda: grammar.structural_tag({"structures": [3], "triggers": ["<"]}),
            "structural_tag.structures[0]",
            "object",
        ),
        (
            lambda: grammar.structural_tag(tag_of({"begin": "[f]"})),
            "structural_tag.structures[0].begin",
            "one of the triggers",
        ),
    ],
)
def test_errors_name_the_field(make: Any, field: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words.replace("[", r"\[")) as caught:
        make()
    assert caught.value.field == field


def test_whitespace_settings_of_a_schema_apply() -> None:
    made = grammar.json_schema({**PERSON, "x-guidance": {"item_separator": ",", "key_separator": ":"}})
    assert accepts('{"name":"Ada","age":36}', made)


def test_forced_text_covers_most_of_a_schema() -> None:
    follow = matcher(grammar.json_schema(PERSON))
    assert follow.forced(20) == ids('{"name": "')
    assert allowed(follow) == [{ids("{")[0]}]


def test_grammar_keeps_the_schema_and_bounds_integers() -> None:
    kept = json.loads(grammar.json_schema(PERSON))["grammars"][0]["json_schema"]["properties"]
    bounds = {"minimum": -(2**53) + 1, "maximum": 2**53 - 1}
    assert kept == {**PERSON["properties"], "age": {"type": "integer", **bounds}}
