"""Tools and reasoning at /v1/chat/completions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.thinking import QwenReasoning
from tests.server.fakes import FakeClient, LiveServer, live

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns it",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, NOW], "max_tokens": 300}
REPLY = (
    "<think>\nHm é\u2028.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Röm"}}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>'
)


@pytest.fixture(scope="module")
def running() -> Iterator[LiveServer]:
    client = lambda: FakeClient(REPLY, max_model_len=4000)  # noqa: E731
    with live(client, parsers=Parsers(HermesTools, QwenReasoning)) as server:
        yield server


@pytest.fixture
def server(running: LiveServer) -> LiveServer:
    running.client.per_step = 3
    running.client.specs.clear()
    running.client.reply = lambda _: REPLY.encode()
    return running


def message(server: LiveServer, **changes: Any) -> dict[str, Any]:
    answer = server.post(PATH, ASK | changes)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def test_calls_and_reasoning_have_openai_format(server: LiveServer) -> None:
    choice = message(server)
    assert choice["finish_reason"] == "tool_calls"
    got = choice["message"]
    assert (got["content"], got["reasoning_content"], got["reasoning"]) == ("I look.", "Hm é\u2028.", "Hm é\u2028.")
    ids = [call.pop("id") for call in got["tool_calls"]]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
    assert got["tool_calls"] == [
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Röm"}'}},
        {"type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]


@pytest.mark.parametrize("per_step", [1, 2, 7, 1000])
def test_joined_stream_equals_the_whole_answer(server: LiveServer, per_step: int) -> None:
    server.client.per_step = per_step
    whole = message(server)
    events = server.post(PATH, ASK | {"stream": True}).events
    assert events.pop() == "[DONE]"
    texts = {"content": "", "reasoning_content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    for event in events:
        [choice] = event["choices"]
        for name, value in choice["delta"].items():
            if name in texts:
                texts[name] += value
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["type"] == "function" and call["id"].startswith("call_") and call["function"]["name"]
                calls.append(call)
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["tool_calls"]
    assert texts == {name: whole["message"][name] for name in texts}
    assert [call["function"] for call in calls] == [call["function"] for call in whole["message"]["tool_calls"]]


def test_no_event_contains_a_unicode_line_break(server: LiveServer) -> None:
    assert "\u2028" not in server.post(PATH, ASK | {"stream": True}).body.decode()


def test_call_truncated_by_max_tokens_ends_cleanly(server: LiveServer) -> None:
    cut = REPLY.encode().index(b'"R') + 2
    choice = message(server, max_tokens=cut)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "R'}


@pytest.mark.parametrize("stream", [False, True])
def test_partial_marker_at_max_tokens_is_not_content(server: LiveServer, stream: bool) -> None:
    for half in (
        "<tool_c",
        "<tool_call>",
        '<tool_call>\n{"na',
        '<tool_call>{"name": "now"}</tool',
        '<tool_call>{"name": "now"}}\n</',
    ):
        server.client.reply = lambda _, half=half: half.encode() + b"-" * 99
        ask = ASK | {"tool_choice": "required", "max_tokens": len(half), "stream": stream}
        answer = server.post(PATH, ask)
        assert answer.status == 200, answer.body
        assert not re.search(rb'"content": ?"[^"]', answer.body), half


def test_partial_marker_at_the_end_of_an_answer_is_text(server: LiveServer) -> None:
    server.client.reply = lambda _: b"It is <"
    assert message(server)["message"]["content"] == "It is <"


def test_parallel_calls_can_be_limited_to_one(server: LiveServer) -> None:
    assert len(message(server, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_without_tools_calls_are_text_and_reasoning_is_parsed(server: LiveServer) -> None:
    for changes in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        choice = message(server, **changes)
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == REPLY.partition("</think>")[2].lstrip()
        assert choice["message"]["reasoning_content"] == "Hm é\u2028."


def test_reasoning_can_be_omitted(server: LiveServer) -> None:
    got = message(server, include_reasoning=False)["message"]
    assert "reasoning_content" not in got and "reasoning" not in got


def test_tools_and_their_results_reach_the_prompt(server: LiveServer) -> None:
    called = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    message(server, messages=turns)
    prompt = bytes(server.client.specs[-1].prompt).decode()
    assert prompt.startswith("system: # Tools")
    assert '{"name": "weather", "description": "Returns it", "parameters"' in prompt
    assert 'assistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "user: <tool_response>\nsunny\n</tool_response>" in prompt


def test_tokenize_counts_the_same_tokens(server: LiveServer) -> None:
    message(server)
    counted = server.post("/tokenize", {"messages": ASK["messages"], "tools": ASK["tools"]}).json
    assert counted["tokens"] == list(server.client.specs[-1].prompt)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'x"}}\n<tool_call>'}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "п" * 3}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [NOW] * 10_000}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_invalid_tools_are_named(server: LiveServer, changes: dict[str, Any], field: str) -> None:
    answer = server.post(PATH, ASK | changes)
    assert (answer.status, answer.error["param"]) == (400, field), answer.body


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "null", "nonsense"])
def test_call_arguments_in_history_never_break_the_server(server: LiveServer, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "x", "arguments": arguments}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "é\u2028"}]
    assert server.post(PATH, ASK | {"messages": turns}).status == 200


def test_thousands_of_tools_are_a_clear_error(server: LiveServer) -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{index}"}} for index in range(1000)]
    answer = server.post(PATH, ASK | {"tools": tools})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_model_without_a_parser_rejects_only_tools() -> None:
    with live() as plain:
        assert plain.post(PATH, ASK).error["param"] == "tools"
        assert plain.post(PATH, ASK | {"tool_choice": "none"}).status == 200


def test_official_client_parses_calls(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.chat.completions.create(model="fake", **ASK)
        [call, _] = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Röm"}
        with client.chat.completions.stream(model="fake", **ASK) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
