"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.thinking import QwenReasoning
from tests.server.fakes import Answer, FakeClient, LiveServer, live

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "Returns it", "input_schema": {"type": "object"}}
ASK = {"model": "fake", "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}]}
REPLY = (
    "<think>\nHm é.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Röm"}}\n</tool_call>\n<tool_call>{"name": "weather"}</tool_call>'
)


@pytest.fixture(scope="module")
def running() -> Iterator[LiveServer]:
    client = lambda: FakeClient(REPLY, max_model_len=4000)  # noqa: E731
    with live(client, parsers=Parsers(HermesTools, QwenReasoning), api_keys=("secret",)) as server:
        yield server


@pytest.fixture
def server(running: LiveServer) -> LiveServer:
    running.client.per_step = 3
    running.client.specs.clear()
    running.client.reply = lambda _: REPLY.encode()
    return running


def post(server: LiveServer, changes: dict[str, Any] | None = None, path: str = PATH) -> Answer:
    return server.post(path, ASK | {"tools": [TOOL]} | (changes or {}), x_api_key="secret")


def prompt(server: LiveServer) -> str:
    return bytes(server.client.specs[-1].prompt).decode()


def events(answer: Answer) -> list[dict[str, Any]]:
    lines = answer.body.decode().split("\n\n")
    found = [each.split("\n") for each in lines if each]
    for name, data in found:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    return [json.loads(data.removeprefix("data: ")) for _, data in found]


def test_answer_has_anthropic_format(server: LiveServer) -> None:
    answer = post(server)
    assert answer.status == 200, answer.body
    body = answer.json
    assert body["id"].startswith("msg_") and (body["type"], body["role"], body["model"]) == (
        "message",
        "assistant",
        "fake",
    )
    ids = [block.pop("id") for block in body["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == 2 and all(each.startswith("toolu_") for each in ids)
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm é.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Röm"}},
        {"type": "tool_use", "name": "weather", "input": {}},
    ]
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    assert body["usage"]["input_tokens"] == len(server.client.specs[-1].prompt)
    assert body["usage"]["output_tokens"] == len(REPLY.encode()) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_omitted_thinking_is_left_out(server: LiveServer, stream: bool) -> None:
    for display, first in (("omitted", "text"), ("summarized", "thinking")):
        answer = post(server, {"thinking": {"type": "adaptive", "display": display}, "stream": stream})
        begun = [event["content_block"] for event in events(answer) if "content_block" in event] if stream else None
        assert (begun or answer.json["content"])[0]["type"] == first


def test_answer_that_continues_a_prefill_is_constrained(server: LiveServer) -> None:
    server.client.reply = lambda _: b'"a": 1}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    turns = [*ASK["messages"], {"role": "assistant", "content": "{" + " " * 200}]
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "tools": []}
    assert post(server, {"messages": turns, **form}).status == 200
    assert server.client.specs[-1].params.reasoning is None


@pytest.mark.parametrize("per_step", [1, 3, 1000])
def test_stream_equals_the_answer_in_official_order(server: LiveServer, per_step: int) -> None:
    server.client.per_step = per_step
    whole = post(server).json
    stream = events(post(server, {"stream": True}))
    assert stream[0]["type"] == "message_start" and stream[0]["message"]["content"] == []
    assert [each["type"] for each in stream[-2:]] == ["message_delta", "message_stop"]
    assert stream[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert stream[-2]["usage"] == whole["usage"]
    blocks: list[dict[str, Any]] = []
    open_block = None
    for event in stream[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(blocks)
            open_block = event["index"]
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
        else:
            assert event["index"] == open_block
            delta = event["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
            if delta["type"] != "signature_delta":
                name = field[delta["type"]]
                blocks[-1]["json" if name == "partial_json" else name] += delta[name]
    assert open_block is None
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    for block in (*blocks, *whole["content"]):
        block.pop("id", None)
    assert blocks == whole["content"]


def test_conversation_with_tools_reaches_the_prompt(server: LiveServer) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    assert post(server, {"messages": turns, "system": [{"type": "text", "text": "Be brief."}]}).status == 200
    rendered = prompt(server)
    assert rendered.startswith("system: Be brief.\n\n# Tools")
    assert 'assistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}' in rendered
    assert rendered.endswith("<tool_response>\nsunny\n</tool_response>\nuser: and?\nassistant: ")


def test_answer_prefix_may_be_given(server: LiveServer) -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": "It is"}]
    assert post(server, {"messages": turns, "tools": None}).status == 200
    assert prompt(server) == "user: hi\nassistant: It is"


@pytest.mark.parametrize(
    ("reply", "changes", "reason", "sequence"),
    [
        ("Yes.", {}, "end_turn", None),
        ("Yes. No.", {"stop_sequences": [" No"]}, "stop_sequence", " No"),
        ("Yes. No.", {"max_tokens": 3}, "max_tokens", None),
        (REPLY, {"max_tokens": 90}, "max_tokens", None),
    ],
)
def test_stop_reasons(
    server: LiveServer, reply: str, changes: dict[str, Any], reason: str, sequence: str | None
) -> None:
    server.client.reply = lambda _: reply.encode()
    body = post(server, changes).json
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    delta = events(post(server, changes | {"stream": True}))[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_token_count_equals_the_prompt_length(server: LiveServer) -> None:
    post(server, {"system": "Be brief."})
    count = server.post(f"{PATH}/count_tokens", {**ASK, "tools": [TOOL], "system": "Be brief."}, x_api_key="secret")
    assert count.json == {"input_tokens": len(server.client.specs[-1].prompt)}


def test_tool_call_can_be_required(server: LiveServer) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        assert post(server, {"tool_choice": choice}).status == 200
        assert server.client.specs[-1].params.grammar is not None
    assert post(server, {"tool_choice": {"type": "none"}}).json["content"][-1]["type"] == "text"
    one = post(server, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}).json
    assert [block["type"] for block in one["content"]].count("tool_use") == 1


def test_output_schema_is_enforced(server: LiveServer) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert post(server, {"tools": None, "output_config": {"format": form}}).status == 200
    assert server.client.specs[-1].params.grammar is not None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "x"}]}]},
            "content[0].type",
        ),
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_errors_have_anthropic_format_and_name_the_field(
    server: LiveServer, changes: dict[str, Any], word: str
) -> None:
    answer = post(server, changes)
    assert answer.status == 400
    assert answer.json["type"] == "error" and answer.json["error"]["type"] == "invalid_request_error"
    assert word in answer.json["error"]["message"]


def test_other_errors_have_their_types(server: LiveServer) -> None:
    def kind(answer: Answer) -> tuple[int, str]:
        return answer.status, answer.json["error"]["type"]

    assert kind(server.post(PATH, ASK)) == (401, "authentication_error")
    assert kind(post(server, {"model": "claude"})) == (404, "not_found_error")
    assert kind(server.get(PATH, x_api_key="secret")) == (405, "invalid_request_error")
    server.client.fail_after = 3
    try:
        assert kind(post(server)) == (500, "api_error")
        server.client.fail_after = 30
        broken = events(post(server, {"stream": True}))
        assert broken[-1]["type"] == "error" and broken[-1]["error"]["type"] == "api_error"
    finally:
        server.client.fail_after = None
