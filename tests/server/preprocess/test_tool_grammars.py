"""Required calls, arguments bound to a schema, and reasoning before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.contract import ReasoningParser
from fd_core.text.parsing.formats.harmony import HarmonyReasoning, HarmonyTools
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.thinking import DeepSeekR1Reasoning, QwenReasoning
from fd_core.types import SamplingParams
from tests.server.fakes import FakeClient, LiveServer, live
from tests.structured.bytewise import END_ID, bytes_compiler, ids

PATH = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool("weather", CITY), tool("now")]}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def hermes() -> Iterator[LiveServer]:
    with live(lambda: FakeClient(max_model_len=4000), parsers=Parsers(HermesTools)) as server:
        yield server


def params_of(server: LiveServer, **changes: Any) -> SamplingParams:
    answer = server.post(PATH, {"max_tokens": 2} | ASK | changes)
    assert answer.status == 200, answer.body
    return server.client.specs[-1].params


def complete(grammar: str, text: str) -> bool:
    """Return True if the grammar accepts the whole text, and it may end there."""
    matcher = bytes_compiler().matcher(grammar)
    tokens = [*ids(text), END_ID]
    return matcher.validate_tokens(tokens) == len(tokens)


def test_free_choice_has_no_grammar(hermes: LiveServer) -> None:
    assert params_of(hermes).grammar is None
    assert params_of(hermes, tool_choice="none").grammar is None


def test_required_allows_only_calls_of_the_tools(hermes: LiveServer) -> None:
    grammar = params_of(hermes, tool_choice="required").grammar
    rome = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert complete(grammar, rome)
    assert complete(grammar, f"{now}\n{rome}")
    assert not complete(grammar, "Hello")
    assert not complete(grammar, "")
    assert not complete(grammar, rome.replace("Rome", "Bern"))
    assert not complete(grammar, rome.replace("weather", "other"))
    one = params_of(hermes, tool_choice="required", parallel_tool_calls=False).grammar
    assert complete(one, now) and not complete(one, f"{now}\n{rome}")


def test_named_tool_is_called_once(hermes: LiveServer) -> None:
    grammar = params_of(hermes, tool_choice=NAMED).grammar
    rome = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert complete(grammar, rome)
    assert not complete(grammar, f"{rome}\n{rome}")
    assert not complete(grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')


def test_strict_tool_constrains_optional_calls(hermes: LiveServer) -> None:
    grammar = params_of(hermes, tools=[tool("weather", CITY, strict=True), tool("now")]).grammar
    assert complete(grammar, "Just text.")
    assert complete(grammar, 'So: <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    assert not complete(grammar, '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>')
    assert complete(grammar, '<tool_call>\n{"name": "now", "arguments": {"any": 1}}\n</tool_call>')


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("form", "whole", "other"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}},
            '{"city": "Rome"}',
            "R",
        ),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "123", "12"),
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[1]"),
    ],
)
def test_answer_is_calls_or_the_requested_format(
    hermes: LiveServer, form: dict[str, Any], whole: str, other: str, strict: bool
) -> None:
    tools = [tool("weather", CITY, strict=strict), tool("now")]
    grammar = params_of(hermes, tools=tools, **form).grammar
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
    assert complete(grammar, whole)
    assert complete(grammar, call % "Oslo")
    assert complete(grammar, "\n".join([call % "Oslo"] * 2))
    assert complete(grammar, call % "Bern") is not strict
    for wrong in (other, "", "So: " + call % "Oslo", whole + call % "Oslo"):
        assert not complete(grammar, wrong)
    one = params_of(hermes, tools=tools, parallel_tool_calls=False, **form).grammar
    assert not complete(one, "\n".join([call % "Oslo"] * 2))
    refused = hermes.post(PATH, ASK | form | {"tool_choice": "required"})
    assert refused.status == 400 and "cannot be combined with required tool calls" in refused.error["message"]
    alone = params_of(hermes, tool_choice="none", **form).grammar
    assert complete(alone, whole) and not complete(alone, call % "Oslo")


def test_constraint_applies_after_the_answer_prefix() -> None:
    with live(lambda: FakeClient(max_model_len=4000), parsers=Parsers(HarmonyTools, HarmonyReasoning)) as server:
        grammar = params_of(server, structured_outputs={"choice": ["yes", "no"]}).grammar
    begin = HarmonyTools.answer_begin
    assert begin and complete(grammar, f"{begin}yes")
    assert not complete(grammar, "yes") and not complete(grammar, f"{begin}maybe")


class UnconstrainedTools(HermesTools):
    @classmethod
    def form(cls, name: str) -> Any:
        return None


def test_parser_without_grammar_rejects_required_calls() -> None:
    with live(lambda: FakeClient(max_model_len=4000), parsers=Parsers(UnconstrainedTools)) as server:
        for changes, field in (
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": NAMED}, "tool_choice"),
            ({"tools": [tool("now", {}, strict=True)]}, "tools[].function.strict"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
        ):
            error = server.post(PATH, ASK | changes).error
            assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        assert server.post(PATH, ASK).status == 200


def test_tool_schemas_are_bounded(hermes: LiveServer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    huge = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(20_000)}}
    for schema in (deep, huge):
        answer = hermes.post(PATH, ASK | {"tools": [tool("weather", schema)], "tool_choice": "required"})
        assert (answer.status, answer.error["param"]) in (
            (400, "tools[0].function.parameters"),
            (400, "messages"),  # so long that it exceeds the context
        )


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_invalid_schema_is_rejected_by_its_path(hermes: LiveServer, choice: Any) -> None:
    wrong = {"type": "object", "properties": {"city": {"type": "town"}}}
    error = hermes.post(PATH, ASK | {"tools": [tool("weather", wrong, strict=True)], "tool_choice": choice}).error
    assert error["param"].startswith("tools[0].function.parameters") and "town" not in error["param"]
    assert error["code"] == "invalid_grammar" and "<tool_call>" not in error["message"]
    assert hermes.post(PATH, ASK | {"tools": [tool("weather", wrong)]}).status == 200


@pytest.fixture(scope="module")
def thinking() -> Iterator[LiveServer]:
    with live(lambda: FakeClient(max_model_len=4000), parsers=Parsers(HermesTools, DeepSeekR1Reasoning)) as server:
        yield server


def test_grammar_starts_after_reasoning(thinking: LiveServer) -> None:
    params = params_of(thinking, tool_choice=NAMED)
    assert params.reasoning.end == tuple(b"</think>")
    assert params.reasoning.max_tokens is None
    assert complete(params.grammar, '\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')


def test_response_format_starts_after_reasoning(thinking: LiveServer) -> None:
    params = params_of(thinking, tools=None, response_format={"type": "json_object"})
    assert params.reasoning.end == tuple(b"</think>") and params.grammar is not None


def test_required_tools_exclude_a_response_format(hermes: LiveServer) -> None:
    body = ASK | {"tool_choice": "required", "response_format": {"type": "json_object"}}
    assert hermes.post(PATH, body).error["param"] == "response_format"


def test_reasoning_budget_has_two_names(thinking: LiveServer) -> None:
    assert params_of(thinking, reasoning_max_tokens=7).reasoning.max_tokens == 7
    assert params_of(thinking, thinking_token_budget=0).reasoning.max_tokens == 0
    assert params_of(thinking).reasoning is None
    error = thinking.post(PATH, ASK | {"reasoning_max_tokens": 1, "thinking_token_budget": 2}).error
    assert error["param"] == "thinking_token_budget"


@pytest.mark.parametrize("form", [{"tool_choice": "required"}, {"tools": [tool("weather", CITY, strict=True)]}])
def test_budget_is_rejected_if_reasoning_is_in_the_grammar(form: dict[str, Any]) -> None:
    with live(lambda: FakeClient(max_model_len=4000), parsers=Parsers(HarmonyTools, HarmonyReasoning)) as server:
        error = server.post(PATH, ASK | form | {"reasoning_max_tokens": 7}).error
        assert params_of(server, reasoning_max_tokens=7).reasoning.max_tokens == 7
    assert (error["param"], error["code"]) == ("reasoning_max_tokens", "unsupported_parameter")
    assert "reasoning is part of their grammar" in error["message"]


def test_model_without_reasoning_rejects_a_budget(hermes: LiveServer) -> None:
    error = hermes.post(PATH, ASK | {"reasoning_max_tokens": 7}).error
    assert (error["param"], error["code"]) == ("reasoning_max_tokens", "unsupported_parameter")


@pytest.mark.parametrize(
    ("parser", "tail", "switched", "begins"),
    [
        (QwenReasoning, "<think>\n", False, True),
        (QwenReasoning, "<think>\n\n</think>\n\n", True, False),
        (QwenReasoning, "user: hi", True, True),
        (QwenReasoning, "hi", False, False),
        (HarmonyReasoning, "<|channel|>final<|message|>Hi.<|return|><|start|>assistant", False, True),
        (HarmonyReasoning, "<|start|>assistant<|channel|>final<|message|>The answer", False, False),
    ],
)
def test_reasoning_begins_by_prompt_tail_or_template(
    parser: type[ReasoningParser], tail: str, switched: bool, begins: bool
) -> None:
    assert parser.begins_reasoning(tail, switched) is begins
