"""Any answer of the model is accepted as history by each of the APIs that returned it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fd_core.server.messages.schemas import InputBlock
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.thinking import QwenReasoning
from tests.server import fakes
from tests.server.fakes import FakeClient, LiveServer, live

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ITEMS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}\n{% endfor %}{{ tools }}"
)
REPLIES = [
    '<tool_call>\n{"name": "look", "arguments": {"city": "Par',
    '<tool_call>\n{"name": "look", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": null}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": "Paris"}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {"city": "\\ud83d"}}\n</tool_call>',
    "",
    "<think>\nHm",
    "<think>\nHm.\n</think>\n\n",
]


@pytest.fixture(scope="module", params=[None, ITEMS], ids=["without tools", "items"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    client = lambda: FakeClient(max_model_len=4000)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        if request.param is not None:
            patch.setattr(fakes, "chat_template", lambda: ChatTemplate(request.param))
        with live(client, parsers=Parsers(HermesTools, QwenReasoning), response_store=4) as running:
            yield running


def ask(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize("reply", REPLIES)
def test_each_api_accepts_its_own_answer_as_history(server: LiveServer, reply: str) -> None:
    server.client.reply = lambda _: reply.encode()
    user = {"role": "user", "content": "hi"}
    chat = {"tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}], "max_tokens": 500}
    turn = ask(server, "/v1/chat/completions", messages=[user], **chat)["choices"][0]["message"]
    answers = [{"role": "tool", "tool_call_id": each["id"], "content": "ok"} for each in turn.get("tool_calls", ())]
    ask(server, "/v1/chat/completions", messages=[user, turn, *answers, user], **chat)

    flat = {"tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]}
    response = ask(server, "/v1/responses", input="hi", **flat)
    results = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "ok"}
        for each in response["output"]
        if each["type"] == "function_call"
    ]
    ask(server, "/v1/responses", input=[user, *response["output"], *results, user], **flat)
    ask(server, "/v1/responses", input=[*results, user], previous_response_id=response["id"], **flat)

    tools = {"tools": [{"name": "look", "input_schema": SCHEMA}], "max_tokens": 500, "model": "fake"}
    content = ask(server, "/v1/messages", messages=[user], **tools)["content"]
    results = [
        {"type": "tool_result", "tool_use_id": each["id"], "content": "ok"}
        for each in content
        if each["type"] == "tool_use"
    ]
    turns = [
        user,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [*results, {"type": "text", "text": "x"}]},
    ]
    ask(server, "/v1/messages", messages=turns, **tools)


@pytest.mark.parametrize("given", [{"city": "Paris"}, {}, None, "", '{"city": "Par', [1], [], 3, True])
def test_messages_api_accepts_any_input_of_a_call(server: LiveServer, given: Any) -> None:
    used = {"type": "tool_use", "id": "t1", "name": "look", "input": given}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "ok"}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    ask(server, "/v1/messages", messages=turns, max_tokens=9, model="fake")
    assert InputBlock(type="tool_use").input is None


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "assistant", "content": "", "tool_calls": []}],
        [{"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": None}],
        [{"role": "assistant", "content": None, "reasoning": ""}],
        [{"role": "tool", "tool_call_id": "unknown", "content": "ok"}],
        [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{"}}] * 2000}],
        [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look"}}]}],
    ],
)
def test_earlier_answers_of_any_kind_are_accepted(server: LiveServer, turns: Any) -> None:
    answer = server.post(
        "/v1/chat/completions", {"messages": [*turns, {"role": "user", "content": "x"}], "max_tokens": 5}
    )
    if len(str(turns)) < 4000:
        assert answer.status == 200, answer.body
    else:
        assert answer.error["code"] == "context_length_exceeded", answer.body


def test_answer_in_several_parts_is_kept_whole(server: LiveServer) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    server.client.reply = lambda _: f"First.{call}Second.".encode()
    flat = {"tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]}
    first = ask(server, "/v1/responses", input="hi", **flat)
    ask(server, "/v1/responses", input="And?", previous_response_id=first["id"], **flat)
    prompt = bytes(server.client.specs[-1].prompt).decode()
    assert "First." in prompt and "Second." in prompt
