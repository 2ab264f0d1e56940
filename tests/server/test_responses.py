"""POST /v1/responses, and stored responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fd_core.server.responses.routes import as_chat
from fd_core.server.responses.schemas import InputItem, InputPart, ResponseAnswer, ResponsesRequest
from fd_core.server.state import ResponseStore, StoredResponse
from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.thinking import QwenReasoning
from tests.server.fakes import Answer, FakeClient, LiveServer, live

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
REPLY = (
    "<think>\nHm é.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Röm"}}\n</tool_call>\n<tool_call>{"name": "weather"}</tool_call>'
)


def serving(**settings: Any) -> Any:
    client = lambda: FakeClient(REPLY, max_model_len=4000)  # noqa: E731
    return live(client, parsers=Parsers(HermesTools, QwenReasoning), **settings)


@pytest.fixture(scope="module")
def running() -> Iterator[LiveServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(running: LiveServer) -> LiveServer:
    running.client.per_step = 3
    running.client.specs.clear()
    running.client.reply = lambda _: REPLY.encode()
    return running


@pytest.fixture
def keeping() -> Iterator[LiveServer]:
    with serving(response_store=2) as server:
        yield server


def post(server: LiveServer, **changes: Any) -> Answer:
    return server.post(PATH, {"input": "hi", "tools": [TOOL], **changes})


def prompt(server: LiveServer) -> str:
    return bytes(server.client.specs[-1].prompt).decode()


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_answer_has_openai_format(server: LiveServer) -> None:
    answer = post(server, metadata={"a": "b"})
    assert answer.status == 200, answer.body
    body = answer.json
    assert body["id"].startswith("resp_") and body["object"] == "response" and body["status"] == "completed"
    assert [item["id"].partition("_")[0] for item in body["output"]] == ["rs", "msg", "fc", "fc"]
    assert body["output"][2]["call_id"].startswith("call_")
    assert without_ids(body["output"]) == [
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm é."}],
            "status": "completed",
        },
        {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "status": "completed", "name": "weather", "arguments": '{"city": "Röm"}'},
        {"type": "function_call", "status": "completed", "name": "weather", "arguments": "{}"},
    ]
    assert body["usage"]["input_tokens"] == len(server.client.specs[-1].prompt)
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert (body["metadata"], body["tools"], body["store"]) == ({"a": "b"}, [TOOL], False)


@pytest.mark.parametrize("per_step", [1, 3, 1000])
def test_stream_equals_the_answer_in_official_order(server: LiveServer, per_step: int) -> None:
    server.client.per_step = per_step
    whole = post(server).json
    events = post(server, stream=True).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    merged = [kind for index, kind in enumerate(kinds) if not kind.endswith("delta") or kinds[index - 1] != kind]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    thought = ["output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done"]
    assert merged[2:-1] == [*thought, *text, "output_item.done", *call, *call]
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    assert texts == {0: "Hm é.", 1: "I look.", 2: '{"city": "Röm"}', 3: "{}"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]


def test_truncated_answer_is_incomplete(server: LiveServer) -> None:
    body = post(server, max_output_tokens=40).json
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][-1]["status"] == "incomplete"
    assert post(server, max_output_tokens=40, stream=True).events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_call_with_all_its_arguments_is_complete_though_cut_off(server: LiveServer, stream: bool) -> None:
    most = REPLY.encode().index(b"}\n</tool_call>") + 1
    answer = post(server, max_output_tokens=most, stream=stream)
    final = answer.events[-1]["response"] if stream else answer.json
    assert final["status"] == "incomplete"
    assert (final["output"][-1]["status"], final["output"][-1]["arguments"]) == ("completed", '{"city": "Röm"}')


@pytest.mark.parametrize("reply", [REPLY, REPLY.partition("<tool_call>")[0], "<think>\nHm é.", "<think></think>No."])
def test_reasoning_tokens_do_not_depend_on_the_stream(server: LiveServer, reply: str) -> None:
    server.client.reply = lambda _: reply.encode()
    counts = set()
    for per_step in (1, 2, 3, 7, 1000):
        server.client.per_step = per_step
        counts.add(post(server).json["usage"]["output_tokens_details"]["reasoning_tokens"])
    thought = reply.partition("</think>")[0] if "Hm" in reply else ""
    [count] = counts
    assert len(thought.encode()) <= count <= len(thought + "</think>\n\n") * bool(thought) + 1


def test_conversation_items_reach_the_prompt(server: LiveServer) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "message", "role": "developer", "content": "Go on."},
    ]
    assert post(server, input=items, instructions="Be brief.").status == 200
    rendered = prompt(server)
    assert rendered.startswith("system: Be brief.\n\n# Tools")
    assert rendered.count("<tool_call>\n{") == 3 and rendered.count("<tool_response>\n") == 2
    assert rendered.endswith("system: Go on.\nassistant: ")


def test_reasoning_stays_with_what_it_precedes() -> None:
    def item(kind: str, text: str) -> InputItem:
        part = InputPart(type="reasoning_text" if kind == "reasoning" else "text", text=text)
        if kind == "call":
            return InputItem(type="function_call", call_id=text, name="weather", arguments="{}")
        if kind == "output":
            return InputItem(type="function_call_output", call_id=text, output="sunny")
        return (
            InputItem(type="reasoning", content=[part]) if kind == "reasoning" else InputItem(role=kind, content=[part])
        )

    def messages(*items: tuple[str, str]) -> list[tuple[str, Any, str | None, int]]:
        chat = as_chat(ResponsesRequest(input=[item(*each) for each in items]), ())
        return [(m.role, m.content, m.reasoning_content, len(m.tool_calls or ())) for m in chat.messages or ()]

    cut_off = messages(("user", "hi"), ("reasoning", "One"), ("user", "Go on."), ("assistant", "Two"))
    assert cut_off == [
        ("user", "hi", None, 0),
        ("assistant", "", "One", 0),
        ("user", "Go on.", None, 0),
        ("assistant", "Two", None, 0),
    ]
    between = [
        ("assistant", "I look."),
        ("reasoning", "Rome?"),
        ("call", "1"),
        ("output", "1"),
        ("assistant", "Sunny."),
    ]
    assert messages(("user", "hi"), *between) == [
        ("user", "hi", None, 0),
        ("assistant", "I look.", "Rome?", 1),
        ("tool", "sunny", None, 0),
        ("assistant", "Sunny.", None, 0),
    ]
    assert messages(("reasoning", "La"), ("reasoning", "st")) == [("assistant", "", "Last", 0)]


def test_text_format_is_enforced(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    body = post(server, tools=None, text={"format": form})
    assert body.status == 200 and body.json["text"]["format"] == form
    assert server.client.specs[-1].params.grammar is not None
    assert post(server, tools=None, text={"format": {"type": "text"}}).status == 200
    assert server.client.specs[-1].params.grammar is None


def test_tool_call_can_be_required(server: LiveServer) -> None:
    for choice in ("required", {"type": "function", "name": "weather"}):
        assert post(server, tool_choice=choice).status == 200
        assert server.client.specs[-1].params.grammar is not None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "text.format.schema"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ],
)
def test_unsupported_value_is_named(server: LiveServer, changes: dict[str, Any], field: str) -> None:
    answer = post(server, **changes)
    assert (answer.status, answer.error["param"]) == (400, field), answer.body


def test_neutral_values_are_accepted(server: LiveServer) -> None:
    neutral = {"store": False, "truncation": "disabled", "background": False, "include": [], "metadata": {}, "text": {}}
    more = {"reasoning": {"effort": None}, "top_logprobs": 0, "previous_response_id": None, "service_tier": "auto"}
    more["stream_options"] = {"include_obfuscation": False}
    assert post(server, **neutral, **more).status == 200


def test_stored_response_can_be_continued(keeping: LiveServer) -> None:
    first = post(keeping, instructions="Be brief.").json
    assert first["store"] is True
    second = post(keeping, input="And?", previous_response_id=first["id"]).json
    assert second["previous_response_id"] == first["id"]
    rendered = prompt(keeping)
    assert "Be brief." not in rendered
    assert "user: hi\nassistant: I look.\n<tool_call>" in rendered and rendered.endswith("user: And?\nassistant: ")
    assert keeping.get(f"{PATH}/{first['id']}").json == first
    assert keeping.request("DELETE", f"{PATH}/{first['id']}").json["deleted"] is True
    assert keeping.get(f"{PATH}/{first['id']}").status == 404
    missing = post(keeping, previous_response_id=first["id"])
    assert (missing.status, missing.error["code"]) == (404, "previous_response_not_found")


def test_input_tokens_are_those_of_the_response(keeping: LiveServer) -> None:
    first = keeping.post(PATH, {"input": "hello"}).json
    body = {"input": "again", "previous_response_id": first["id"], "instructions": "Be brief.", "max_output_tokens": 3}
    counted = keeping.post(f"{PATH}/input_tokens", body)
    used = keeping.post(PATH, body).json["usage"]["input_tokens"]
    assert counted.json == {"object": "response.input_tokens", "input_tokens": used}
    refused = keeping.post(f"{PATH}/input_tokens", {"input": "x", "model": "other"})
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")


def test_stored_response_cannot_be_streamed(keeping: LiveServer) -> None:
    kept = post(keeping).json["id"]
    assert keeping.get(f"{PATH}/{kept}?stream=false").status == 200
    refused = keeping.get(f"{PATH}/{kept}?stream=true")
    assert (refused.status, refused.error["param"]) == (400, "stream")


def test_store_false_is_respected(keeping: LiveServer) -> None:
    body = post(keeping, store=False).json
    assert body["store"] is False and keeping.get(f"{PATH}/{body['id']}").status == 404


def stored(name: str, size: int) -> StoredResponse:
    item = {"type": "message", "content": [{"text": "x" * size}]}
    return StoredResponse(
        ResponseAnswer(
            id=name,
            created_at=0,
            status="completed",
            model="m",
            output=[item],
            parallel_tool_calls=True,
            reasoning={},
            store=True,
            temperature=1.0,
            text={},
            tool_choice="auto",
            tools=[],
            top_p=1.0,
            metadata={},
        ),
        (),
    )


def test_store_is_bounded() -> None:
    store = ResponseStore(2, max_bytes=5000)
    for name in "abc":
        store.put("", stored(name, 10))
    assert (len(store), store.get("", "a")) == (2, None)
    store.put("", stored("large", 4500))
    assert (len(store), store.get("", "c")) == (1, None)
    store.put("", stored("larger", 6000))
    assert store.get("", "larger") is None and store.get("", "large") is not None
    assert store.delete("", "large") and not store.delete("", "large")
    for _ in range(9):
        store.put("", stored("again", 3000))
    store.put("", stored("b", 10))
    assert (len(store), store.get("", "again") is not None) == (2, True), "a replaced response is not counted"
    fair = ResponseStore(4)
    fair.put("bob", stored("b", 10))
    for number in range(9):
        fair.put("alice", stored(f"{number}", 10))
    assert fair.get("bob", "b") is not None, "a key evicts its own responses first"
    assert [fair.get("alice", f"{number}") is not None for number in range(9)] == [False] * 6 + [True] * 3


def test_official_client_parses_answers_and_streams(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.responses.create(model="fake", input="hi", tools=[TOOL])
        assert answer.output_text == "I look."
        assert json.loads(answer.output[2].arguments) == {"city": "Röm"}
        with client.responses.stream(model="fake", input="hi", tools=[TOOL]) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_text == "I look."


def test_owner_cannot_evict_responses_of_others() -> None:
    for store in (ResponseStore(4), ResponseStore(100, max_bytes=3000)):
        store.put("alice", stored("one", 10))
        for index in range(20):
            store.put("bob", stored(f"resp_{index}", 10))
        assert store.get("alice", "one") is not None and store.get("bob", "resp_19") is not None
        assert store.get("bob", "resp_0") is None and store.get("bob", "one") is None
        before = len(store)
        assert store.delete("alice", "one") and not store.delete("alice", "one") and len(store) == before - 1
