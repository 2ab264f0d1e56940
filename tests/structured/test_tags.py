"""Structural tags have the meaning of XGrammar's documentation, or are rejected by name and path."""

from __future__ import annotations

from typing import Any

import pytest

from fd_core.errors import BadRequest
from fd_core.structured import grammar
from tests.structured.bytewise import END_ID, ids, matcher

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
YES = {"type": "const_string", "value": "yes"}
FREE = {"type": "any_text"}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


A, B = tag("<a>", NUMBER, "</a>"), tag("<b>", YES, "</b>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [A, B]}
SEPARATED = {"type": "tags_with_separator", "tags": [A, B], "separator": ", "}
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}


def row(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def accepts(text: str, made: str) -> bool:
    tokens = ids(text)
    return matcher(made).allowed([*tokens, END_ID]) == len(tokens) + 1


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (YES, ["yes"], ["", "no", "yes "]),
        (NUMBER, ["12"], ["x", ""]),
        ({**NUMBER, "json_schema": True}, ["12", '{"a": [1]}'], ["x"]),
        (FREE, ["", "any\n<text>"], []),
        ({**FREE, "excludes": ["no", "<"]}, ["", "n o"], ["no", "a <", "yes no"]),
        ({**FREE, "max_chars": 3}, ["", "äöü"], ["four"]),
        ({"type": "regex", "pattern": "a/b+\n?"}, ["a/b", "a/bb\n"], ["ab"]),
        ({"type": "regex", "pattern": "[a-z]+", "excludes": ["no"]}, ["on"], ["no", "annoy"]),
        ({"type": "grammar", "grammar": 'root ::= "x" root | "y"'}, ["y", "xxy"], ["x"]),
        ({"type": "grammar", "grammar": 'start: "x" start | "y"'}, ["xy"], ["x"]),
        (row(YES, NUMBER), ["yes1"], ["yes", "1"]),
        (row(YES, FREE), ["yes", "yes, well"], ["no"]),
        ({"type": "or", "elements": [YES, NUMBER]}, ["yes", "1"], ["yes1", ""]),
        (row({"type": "optional", "content": YES}, NUMBER), ["yes1", "1"], ["yesyes1"]),
        (row({"type": "plus", "content": YES}, NUMBER), ["yes1", "yesyes1"], ["1"]),
        (row({"type": "star", "content": YES}, NUMBER), ["1", "yesyes1"], ["yes"]),
        ({"type": "repeat", "content": YES, "min": 1, "max": 2}, ["yes", "yesyes"], ["", "yesyesyes"]),
        ({"type": "repeat", "content": YES, "min": 2, "max": -1}, ["yesyes", "yesyesyes"], ["yes"]),
        (A, ["<a>1</a>"], ["<a>x</a>", "1", "<a>1"]),
        (tag("<a>", NUMBER, ["</a>", "!"]), ["<a>1</a>", "<a>1!"], ["<a>1"]),
        (tag("<a>", FREE, ["</a>", "!"]), ["<a></a>", "<a>x <b>!"], ["<a>x!y!", "<a>"]),
        (tag("<a>", FREE, ""), ["<a>", "<a>x</a>y"], ["x"]),
        (tag("", FREE, "</t>"), ["x</t>"], ["x", "x</t>y"]),
        (row(tag("<t>", FREE, "</t>"), NUMBER), ["<t>hm</t>3"], ["<t>hm</t>", "3"]),
        (tag("<a>", TRIGGERED, "</t>"), ["<a>x</t>", "<a>x<a>1</a>y</t>"], ["<a>x<a>1</a>y", "<a>x<a>y</a></t>"]),
        (tag("<a>", row(YES, tag("<x>", FREE, "</x>")), "!"), ["<a>yes<x>!</x>!"], ["<a>yes<x>!</x>"]),
        (TRIGGERED, ["", "text", "x<a>1</a>y<b>yes</b>"], ["x<a>y", "<b>no</b>", "<aa>"]),
        ({**TRIGGERED, "at_least_one": True}, ["<a>1</a>", "<b>yes</b>x<a>1</a>"], ["", "x<a>1</a>"]),
        ({**TRIGGERED, "stop_after_first": True}, ["x", "x<a>1</a>"], ["<a>1</a>x"]),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, ["<a>1</a>"], ["", "<a>1</a>x"]),
        ({**TRIGGERED, "excludes": ["no"]}, ["n o<a>1</a>"], ["no", "<a>1</a>no"]),
        (SEPARATED, ["", "<a>1</a>", "<a>1</a>, <b>yes</b>"], ["<a>1</a><b>yes</b>", "x"]),
        ({**SEPARATED, "at_least_one": True}, ["<a>1</a>"], [""]),
        ({**SEPARATED, "stop_after_first": True}, ["", "<a>1</a>"], ["<a>1</a>, <a>1</a>"]),
        ({"type": "dispatch", "rules": [["<f>", NUMBER], ["<g>", YES]]}, ["", "a<f>1b<g>yes"], ["<f>x", "<g>no"]),
        ({"type": "dispatch", "rules": [["<f>", NUMBER]], "loop": False}, ["a<f>1"], ["a<f>1b"]),
        (
            {"type": "json_schema", "json_schema": CITY, "style": "qwen_xml"},
            ["<parameter=city>Ro\nme</parameter>", "<parameter=city>R</parameter><parameter=days>3</parameter>"],
            ["<parameter=days>3</parameter>", "<parameter=city>R</parameter><parameter=days>x</parameter>"],
        ),
        (
            {"type": "json_schema", "json_schema": CITY, "style": "glm_xml"},
            ["<arg_key>city</arg_key><arg_value>Rome</arg_value>"],
            ["<arg_key>days</arg_key><arg_value>3</arg_value>"],
        ),
    ],
)
def test_format_matches_as_documented(form: Any, right: list[str], wrong: list[str]) -> None:
    made = grammar.structural_tag({"type": "structural_tag", "format": form})
    for text in right:
        assert accepts(text, made), text
    for text in wrong:
        assert not accepts(text, made), text


def deep(levels: int) -> dict[str, Any]:
    form: dict[str, Any] = YES
    for _ in range(levels):
        form = row(form)
    return form


@pytest.mark.parametrize(
    ("form", "path", "words"),
    [
        ({"type": "token", "token": 3}, ".type", "'token'; expected const_string"),
        ({"type": "token_triggered_tags"}, ".type", "expected"),
        ({}, ".type", "'None'"),
        (3, "", "JSON object"),
        ({**YES, "more": 1}, ".more", "not supported"),
        ({**FREE, "max_tokens": 5}, ".max_tokens", "max_chars"),
        ({**FREE, "max_chars": -1}, ".max_chars", "0 to"),
        (row(FREE, YES), ".elements[0]", "the end of its text"),
        (row(TRIGGERED, YES), ".elements[0]", "the end of its text"),
        (row({"type": "star", "content": FREE}), ".elements[0].content", "the end of its text"),
        ({**NUMBER, "style": "minimax_xml"}, ".style", "expected json, qwen_xml, glm_xml"),
        ({**NUMBER, "any_order": True}, ".any_order", "in the order"),
        ({**NUMBER, "json_schema": 3}, ".json_schema", "JSON object"),
        (tag({"type": "token", "token": 3}, YES, ""), ".begin", "tokens"),  # type: ignore[arg-type]
        (tag("<a>", YES, {"type": "token"}), ".end", "tokens"),
        (tag("<a>", YES, ["</a>", ""]), ".end", "empty"),
        ({**TRIGGERED, "triggers": ["<a"]}, ".tags[1].begin", "one of the triggers"),
        ({**TRIGGERED, "at_least_one": 1}, ".at_least_one", "true or false"),
        ({**SEPARATED, "separator": None}, ".separator", "must be a text"),
        ({**SEPARATED, "tags": [YES]}, ".tags[0].type", "'tag'"),
        ({"type": "repeat", "content": YES, "min": 3, "max": 2}, ".max", "below min"),
        ({"type": "dispatch", "rules": ["<f>"]}, ".rules[0]", "a text and a format"),
        ({"type": "grammar", "grammar": "root ::= other"}, ".grammar", "not found"),
        (row(), ".elements", "1 to 256"),
    ],
)
def test_unsupported_format_is_rejected_by_its_path(form: Any, path: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar.structural_tag({"format": form})
    assert caught.value.field == f"structural_tag.format{path}"
    assert words in str(caught.value)


def test_too_deep_tree_is_rejected() -> None:
    for levels in (40, 5000):
        with pytest.raises(BadRequest, match="deeper than 64"):
            grammar.structural_tag({"format": deep(levels)})
