"""Real-world schemas: keywords without effect are accepted, and every complete answer is valid."""

from __future__ import annotations

import json
import random
import re
import warnings
from typing import Any

import jsonschema
import pytest

from fd_core.errors import BadRequest
from fd_core.structured import grammar
from tests.structured.bytewise import BYTES, END_ID, allowed, matcher
from tests.structured.test_grammar import accepts

A = {"type": "object", "properties": {"kind": {"const": "a"}, "x": {"enum": [1, 2]}}, "required": ["kind"]}
B = {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]}
DISCRIMINATED = {
    "$defs": {"A": {**A, "additionalProperties": False}, "B": {**B, "additionalProperties": False}},
    "discriminator": {"propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
}
LARGEST = 2**63 - 1


def walk(made: str, dice: random.Random) -> str | None:
    """Return a random complete text, or None if it became too long."""
    follow, tokens = matcher(made), []
    while len(tokens) < 120:
        (may,) = allowed(follow)
        assert may, BYTES.decode(tokens)
        if END_ID in may and (len(may) == 1 or dice.random() < 0.5):
            return BYTES.decode(tokens)
        tokens.append(dice.choice(sorted(may - {END_ID})))
        follow.consume(tokens[-1:])
    return None


@pytest.mark.parametrize(
    "schema",
    [
        DISCRIMINATED,
        {"oneOf": [{**A, "additionalProperties": False}, {**B, "required": [], "additionalProperties": False}]},
        {"oneOf": [{"const": 1, "title": "one"}, {"const": 2, "title": "two"}]},
        {"oneOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]},
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False, "maxItems": 2.0},
        {"type": "string", "format": "color", "maxLength": 3},
        {"type": "object", "propertyNames": {"type": "string"}, "dependencies": {}, "maxProperties": 0},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9},
        {"type": "integer", "minimum": 2**62, "maximum": LARGEST},
        {"type": "integer", "minimum": -(2**63), "maximum": -(2**62)},
        {"type": "integer", "minimum": -(2**63), "maximum": LARGEST},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    ],
)
def test_answers_are_valid_for_real_world_schemas(schema: Any) -> None:
    made, dice = grammar.json_schema(schema), random.Random(7)
    texts = {walk(made, dice) for _ in range(40)} - {None}
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(str(text)), schema)


@pytest.mark.parametrize(
    ("schema", "longest"),
    [
        ({"type": "integer"}, 2**53 - 1),
        ({"type": ["integer", "null"]}, 2**53 - 1),
        ({"type": "integer", "minimum": 3}, 2**53 - 1),
        ({"type": "integer", "minimum": 2**60}, 2**63 - 2**10),
        ({"type": "integer", "maximum": 9}, 9),
    ],
)
def test_integers_end_without_a_bound_of_the_schema(schema: Any, longest: int) -> None:
    made = grammar.json_schema(schema)
    assert accepts(str(longest), made)
    assert not accepts(str(10 * longest), made)
    assert not accepts(f"-1{'0' * 19}", made)


def test_unknown_dialect_is_accepted() -> None:
    assert accepts("null", grammar.json_schema({"$schema": "http://json-schema.org/schema#", "type": "null"}))


def test_options_with_a_discriminator_are_alternatives() -> None:
    made = grammar.json_schema(DISCRIMINATED)
    assert accepts('{"kind": "a", "x": 2}', made) and accepts('{"kind": "c"}', made)
    assert not accepts('{"kind": "d"}', made)


@pytest.mark.parametrize(
    "options",
    [
        [{"const": 1}, {"enum": [2, 1.0]}],
        [{"type": "integer"}, {"type": "number"}],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/nowhere"}],
        [{**A, "required": []}, {**B, "required": []}],
        [A, {**B, "properties": {"kind": {"type": "string"}}}],
        [{**A, "type": ["object", "null"]}, {**B, "type": ["object", "null"]}],
        [{**A, "properties": {"kind": {"$ref": "#"}}}, {**B, "properties": {"kind": {"$ref": "#"}}}],
    ],
)
def test_options_that_may_overlap_are_rejected(options: Any) -> None:
    schema = {"$defs": {"a": {"type": "null"}}, "oneOf": options}
    with pytest.raises(Exception, match=r"oneOf constraints|does not exist"):
        matcher(grammar.json_schema(schema)).allowed([])


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"const": [2**53 + 1]}, "const"),
        ({"properties": {"a": {"enum": [{"b": -(2**60)}]}}}, "properties.a.enum"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "required": ["a", "a"], "minProperties": 3}, "minProperties"),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}]}, "anyOf[0].exclusiveMinimum"),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, "exclusiveMaximum"),
        ({"type": "integer", "minimum": 2**63}, "minimum"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "maximum"),
    ],
)
def test_unsupported_keyword_is_rejected_by_its_path(schema: Any, path: str) -> None:
    with pytest.raises(BadRequest) as error:
        grammar.json_schema(schema, field="s")
    assert error.value.field == f"s.{path}"


def test_values_that_look_like_keywords_are_kept() -> None:
    schema = {"const": {"format": "color", "uniqueItems": False, "minimum": 3}}
    assert accepts('{"format": "color", "uniqueItems": false, "minimum": 3}', grammar.json_schema(schema))
    named = {"type": "object", "properties": {"format": {"const": "x"}}, "required": ["format"]}
    assert accepts('{"format": "x"}', grammar.json_schema(named))


CHARACTERS = [*map(chr, range(1, 128)), "é", "\u2028", "日", "\U0001f600"]


@pytest.mark.parametrize(
    "characters",
    [
        '[^"]',
        "[^\\\\]",
        '[^"\\\\]',
        '[^"\n]',
        "[^\\x22\\\\x]",
        "[\x00-!]",
        "[^<>'\"]",
        "[!@#$%^&&*()]",
        "[a-z&&[^b\\]]",
        "[+--]",
        "[a-c--b]",
        "[a~~b]",
        "[a[]",
        "[-.]",
        "[^-[\\]~]",
        "[]a]",
        "[^\\d.-]",
        "[\\D]",
        "[^\\W]",
        ".",
    ],
)
def test_classes_of_patterns_match_as_in_json_schema(characters: str) -> None:
    made = grammar.json_schema({"type": "string", "pattern": f"^{characters}$"})
    named = grammar.json_schema(
        {"type": "object", "patternProperties": {f"^{characters}$": {"const": 1}}, "additionalProperties": False}
    )
    with warnings.catch_warnings(action="ignore"):  # Python warns of classes that other languages read otherwise
        plain = re.compile(characters, re.ASCII)
    for each in CHARACTERS:
        texts = {json.dumps(each), json.dumps(each, ensure_ascii=False)}
        expected = plain.fullmatch(each) is not None
        if not "\x1c" <= each <= "\x1f":  # which are white space in Python alone
            assert any(accepts(text, made) for text in texts) == expected, each
            assert any(accepts(f"{{{text}: 1}}", named) for text in texts) == expected, each


def test_class_with_unicode_property_excludes_escapes() -> None:
    made = grammar.json_schema({"type": "string", "pattern": '^[^\\p{L}"]$'})
    assert accepts('"7"', made) and accepts('"\\n"', made)
    assert not accepts('"é"', made) and not accepts('"\\""', made)


DAYS = ["2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "0000-01-01", "2024-13-01", "2024-01-32"]
TIMES = ["12:00:60Z", "24:00:00Z", "12:00:00", "12:00:00+24:00"]
EMAILS = ["a@b", "a..b@example.org", "a@-b.org", f"{'a' * 65}@example.org", f"a@{'b.' * 150}org", "a b@example.org"]
VALID_TEXTS = {
    "date": ["2024-02-29", "2000-02-29", "2024-01-31", "0001-12-31", "2023-11-30"],
    "time": ["00:00:00Z", "23:59:59.123456789+05:30"],
    "date-time": ["2024-02-29T23:59:59Z", "2024-01-31T00:00:00.5-08:00"],
    "email": ["a@b.de", "jean.de.la-fontaine+x@my-company.co.uk", f"{'a' * 64}@example.org"],
}
INVALID_TEXTS = {
    "date": DAYS,
    "time": TIMES,
    "date-time": [*(f"{day}T12:00:00Z" for day in DAYS), *(f"2024-01-31T{time}" for time in TIMES)],
    "email": EMAILS,
}


@pytest.mark.parametrize("name", VALID_TEXTS)
def test_formats_are_those_that_programs_read(name: str) -> None:
    schema = {"type": "string", "format": name}
    made, within = grammar.json_schema(schema), grammar.json_schema({**schema, "pattern": "4", "allOf": [{}]})
    for text in VALID_TEXTS[name]:
        assert accepts(f'"{text}"', made), text
        assert accepts(f'"{text}"', within) == ("4" in text), text
    for text in INVALID_TEXTS[name]:
        assert not accepts(f'"{text}"', made) and not accepts(f'"{text}"', within), text
