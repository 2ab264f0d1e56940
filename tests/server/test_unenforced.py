"""Schemas that are not strict: unenforceable parts are left open and reported; strict ones are rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.formats.tagged import QwenCoderTools
from tests.server.fakes import FakeClient, LiveServer, live

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
PLACE = "tools[0].function.parameters"
STRING = {"type": "string"}
UNUSUAL: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"type": "array", "items": STRING, "uniqueItems": True}, ".uniqueItems"),
    "not": ({"type": "string", "not": {"const": "a"}}, ".not"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, ".propertyNames"),
    "word boundary": ({"type": "string", "pattern": r"\bfoo\b"}, ".pattern"),
    "lookahead": ({"type": "string", "pattern": "^(?=a)b"}, ".pattern"),
    "backreference": ({"type": "string", "pattern": r"(a)\1"}, ".pattern"),
    "unknown type": ({"type": "any"}, ".type"),
    "types": ({"type": ["string", "any"]}, ".type"),
    "if": ({"if": {"const": 1}, "then": STRING}, ".if"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    "contains": ({"type": "array", "contains": {"const": 1}}, ".contains"),
    "unevaluated": ({"type": "object", "unevaluatedProperties": False}, ".unevaluatedProperties"),
    "dynamic reference": ({"$dynamicRef": "#x"}, ".$dynamicRef"),
    "unknown reference": ({"$ref": "#/$defs/x"}, ".$ref"),
    "remote reference": ({"$ref": "https://example.org/x"}, ".$ref"),
    "no schema": ([1], ""),
}
HARMLESS: list[Any] = [
    {"type": "string", "format": "unknown"},
    {"type": "number", "minimum": 0, "exclusiveMinimum": True},
    {"type": "string", "nullable": True},
    {},
    True,
]


def tool(inner: Any, strict: bool | None = None) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"q": inner, "n": {"type": "integer"}}, "required": ["n"]}
    return {"type": "function", "function": {"name": "look", "parameters": schema, "strict": strict}}


@pytest.fixture(scope="module", params=[HermesTools, QwenCoderTools])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with live(lambda: FakeClient(max_model_len=9000), parsers=Parsers(request.param)) as each:
        yield each


def ask(server: LiveServer, *tools: Any, **more: Any) -> Any:
    return server.post(CHAT, {"messages": HI, "max_tokens": 2, "tool_choice": "required", "tools": [*tools], **more})


@pytest.mark.parametrize("name", UNUSUAL)
def test_unsupported_schema_is_left_open_and_reported(server: LiveServer, name: str) -> None:
    inner, word = UNUSUAL[name]
    answer = ask(server, tool(inner), {"type": "function", "function": {"name": "now"}})
    assert answer.status == 200, answer.body
    warning = answer.json["warnings"][0]
    assert warning["param"] == f"{PLACE}.properties.q{word}"
    assert "not enforced" in warning["message"]
    grammar = server.client.specs[-1].params.grammar
    assert ("now" in grammar and "integer" in grammar) or "-?(0|[1-9]" in grammar  # the rest is still enforced


@pytest.mark.parametrize("name", UNUSUAL)
def test_unsupported_strict_schema_names_tool_and_path(server: LiveServer, name: str) -> None:
    error = ask(server, tool(UNUSUAL[name][0], strict=True)).error
    assert error["param"].startswith(PLACE) and "'look'" in error["message"]
    assert error["code"] == "invalid_grammar"


@pytest.mark.parametrize("inner", HARMLESS, ids=str)
def test_keywords_without_effect_need_no_warning(server: LiveServer, inner: Any) -> None:
    for strict in (None, True):
        assert "warnings" not in ask(server, tool(inner, strict)).json


@pytest.mark.parametrize(
    "function", [{"name": "f"}, {"name": "f", "parameters": None}, {"name": "f", "parameters": {}}]
)
def test_tool_without_parameters_can_be_required(server: LiveServer, function: Any) -> None:
    assert "warnings" not in ask(server, {"type": "function", "function": function}).json


def test_stream_reports_it_once_at_its_beginning(server: LiveServer) -> None:
    first, *rest = ask(server, tool(UNUSUAL["not"][0]), stream=True).events
    assert first["warnings"][0]["param"] == f"{PLACE}.properties.q.not"
    assert all("warnings" not in event for event in rest[:-1])


def test_streamed_completion_reports_it_for_each_text(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"q": UNUSUAL["not"][0]}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    body = {"prompt": "hi", "max_tokens": 2, "n": 2, "response_format": form}
    whole = server.post("/v1/completions", body).json
    events = server.post("/v1/completions", body | {"stream": True}).events[:-1]
    found = [(event["choices"][0]["index"], event["warnings"]) for event in events if "warnings" in event]
    assert sorted(found) == [(0, whole["warnings"]), (1, whole["warnings"])]


def flat(**more: Any) -> dict[str, Any]:
    given = tool(UNUSUAL["not"][0])["function"]
    return {"type": "function", "name": given["name"], "parameters": given["parameters"], **more}


def test_responses_report_it(server: LiveServer) -> None:
    body = {"input": "hi", "max_output_tokens": 2, "tool_choice": "required", "tools": [flat()]}
    assert server.post(RESPONSES, body).json["warnings"][0]["param"] == "tools[0].parameters.properties.q.not"
    events = server.post(RESPONSES, body | {"stream": True}).events
    shown = [event["response"] for event in events if isinstance(event, dict) and "response" in event]
    assert len(shown) > 2 and all(each["warnings"] for each in shown)
    error = server.post(RESPONSES, body | {"tools": [flat(strict=True)]}).error
    assert error["param"].startswith("tools[0].parameters")


def test_messages_report_it(server: LiveServer) -> None:
    given = {"name": "look", "input_schema": flat()["parameters"]}
    body = {"model": "fake", "messages": HI, "max_tokens": 2, "tool_choice": {"type": "any"}, "tools": [given]}
    assert server.post(MESSAGES, body).json["warnings"][0]["param"] == "tools[0].input_schema.properties.q.not"
    events = server.post(MESSAGES, body | {"stream": True}).events
    assert events[0]["message"]["warnings"][0]["param"] == "tools[0].input_schema.properties.q.not"
    assert server.post(MESSAGES, body | {"tools": [given | {"strict": True}]}).status == 400


@pytest.mark.parametrize("strict", [False, None, True])
def test_response_format_is_left_open_only_if_not_strict(server: LiveServer, strict: bool | None) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    answer = server.post(CHAT, {"messages": HI, "max_tokens": 2, "response_format": form})
    path = "response_format.json_schema.schema.properties.a"
    if strict is False:
        assert answer.json["warnings"][0]["param"] == f"{path}.not"
    else:
        assert answer.error["param"] == path


def test_schema_unsupported_throughout_is_left_open_as_a_whole(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"not": {}} for i in range(200)}}
    given = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = ask(server, given)
    assert json.loads(answer.body)["warnings"][0]["param"] == PLACE
