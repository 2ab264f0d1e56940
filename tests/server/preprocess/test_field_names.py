"""Errors name the field that the client sent, not its internal name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from tests.server.fakes import FakeClient, LiveServer, live

TEXT, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
TURN = {"role": "user", "content": "hi"}
HARD = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
SCHEMA = {"type": "object", "properties": {}}
LONG = "a" * 1200


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(lambda: FakeClient(max_model_len=1000), parsers=Parsers(HermesTools, None)) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (CHAT, {"reasoning_max_tokens": 5}, "reasoning_max_tokens"),
        (TEXT, {"min_new_tokens": 20}, "min_new_tokens"),
        (TEXT, {"min_tokens": 20}, "min_tokens"),
        (CHAT, {"min_new_tokens": 2, "guided_regex": "a+"}, "min_new_tokens"),
        (TEXT, {"min_new_tokens": 2, "allowed_token_ids": [256]}, "allowed_token_ids"),
        (TEXT, {"max_completion_tokens": 9999}, "max_completion_tokens"),
        (TEXT, {"prompt": None, "prompt_token_ids": [1] * 1200}, "prompt_token_ids"),
        (CHAT, {"messages": None, "prompt_token_ids": [1] * 1200}, "prompt_token_ids"),
        (CHAT, {"disable_chat_template": True, "messages": [TURN | {"content": ""}]}, "messages"),
        (TEXT, {"guided_json": HARD}, "guided_json"),
        (TEXT, {"guided_regex": "("}, "guided_regex"),
        (TEXT, {"guided_grammar": "start: nothing"}, "guided_grammar"),
        (TEXT, {"guided_choice": [LONG * 1000]}, "guided_choice"),
        (TEXT, {"guided_json": SCHEMA, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern"),
        (TEXT, {"json_schema": SCHEMA, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern"),
        (
            TEXT,
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "("}},
            "structured_outputs.whitespace_pattern",
        ),
        (TEXT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (TEXT, {"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        (TEXT, {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        (TEXT, {"structured_outputs": {"structural_tag": {"structures": 1}}}, "structured_outputs.structural_tag"),
        (TEXT, {"ebnf": "start: nothing"}, "ebnf"),
        (TEXT, {"regex": "("}, "regex"),
        (TEXT, {"json_schema": "{"}, "json_schema"),
        (CHAT, {"tools": [function()], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        (RESPONSES, {"max_output_tokens": 9999}, "max_output_tokens"),
        (RESPONSES, {"input": LONG}, "input"),
        (RESPONSES, {"instructions": "a", "input": [TURN, {"role": "x", "content": "a"}]}, "input[1].role"),
        (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        (
            RESPONSES,
            {"tools": [{"type": "function", "name": "f", "parameters": HARD, "strict": True}]},
            "tools[0].parameters",
        ),
        (
            RESPONSES,
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice.name",
        ),
        (
            RESPONSES,
            {
                "tools": [{"type": "function", "name": "f"}],
                "tool_choice": "required",
                "text": {"format": {"type": "json_object"}},
            },
            "text.format",
        ),
        (MESSAGES, {"messages": [TURN | {"content": LONG}]}, "messages"),
        (MESSAGES, {"tools": [{"name": "a b"}]}, "tools[0].name"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": HARD, "strict": True}]}, "tools[0].input_schema"),
        (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": HARD}}, "output_format.schema"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": HARD}}},
            "output_config.format.schema",
        ),
        (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
        ("/v1/score", {"text_1": "a", "documents": [LONG]}, "documents"),
        ("/v1/score", {"queries": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_2"),
        ("/v1/score", {"queries": [], "text_2": "d"}, "queries"),
    ],
)
def test_error_names_the_sent_field(server: LiveServer, path: str, body: dict[str, Any], field: str) -> None:
    usual: dict[str, dict[str, Any]] = {
        TEXT: {"prompt": "a", "max_tokens": 10},
        CHAT: {"messages": [TURN], "max_tokens": 10},
        RESPONSES: {"model": "fake", "input": "hi"},
        MESSAGES: {"model": "fake", "max_tokens": 10, "messages": [TURN]},
    }
    request = {name: value for name, value in (usual.get(path, {}) | body).items() if value is not None}
    if "max_completion_tokens" in request:
        del request["max_tokens"]
    answer = server.post(path, request)
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    if path != MESSAGES:
        assert error["param"].startswith(field), error
    foreign = ("function.", "response_format", "max_completion_tokens", "min_tokens", "text_1", "text_2")
    sent = [name for name in foreign if name not in field and name not in request and name in error["message"]]
    assert not sent, error
    if "the context length" not in error["message"]:
        assert re.split(r"\W", field)[0] in error["message"], error


def test_echo_logprobs_error_names_logprobs(server: LiveServer) -> None:
    prompts = [[1] * 900] * 128
    answer = server.post(TEXT, {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 20})
    assert (answer.status, answer.error["param"]) == (400, "logprobs")


def test_both_names_of_a_required_schema_are_read(server: LiveServer) -> None:
    body = {"model": "fake", "max_tokens": 10, "messages": [TURN]}
    form = {"type": "json_schema", "schema": SCHEMA}
    assert server.post(MESSAGES, body | {"output_config": {}, "output_format": form}).status == 200
    assert server.client.specs[-1].params.grammar is not None
