"""Hostile tools, and truncated calls: a clear 400 or a clean end, and no delay for others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.harmony import HarmonyTools
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.formats.pythonic import PythonicTools
from fd_core.text.parsing.formats.tagged import GlmTools, QwenCoderTools
from tests.server.fakes import FakeClient, LiveServer, live
from tests.speed import slowdown

CHAT = "/v1/chat/completions"
FORMATS = {
    "hermes": HermesTools,
    "pythonic": PythonicTools,
    "glm45": GlmTools,
    "qwen3_coder": QwenCoderTools,
    "gpt_oss": HarmonyTools,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TEXTS = {
    "hermes": 'Ok <tool_call>\n{"name": "weather", "arguments": {"city": "Röm, 東", "days": 3}}\n</tool_call>',
    "pythonic": '[weather(city="Röm, 東", days=3)]',
    "glm45": "Ok <tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Röm, 東</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "qwen3_coder": "Ok <tool_call>\n<function=weather>\n<parameter=city>\nRöm, 東\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "gpt_oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Röm, 東", "days": 3}<|call|>',
}
EACH = pytest.mark.parametrize("name", FORMATS)
HI = [{"role": "user", "content": "hi"}]


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, LiveServer]]:
    with ExitStack() as open_ones:
        yield {
            name: open_ones.enter_context(
                live(lambda text=TEXTS[name]: FakeClient(text, max_model_len=4_000_000), parsers=Parsers(parser))
            )
            for name, parser in FORMATS.items()
        }


def ask(server: LiveServer, *tools: Any, **more: Any) -> Any:
    body = {"messages": HI, "max_tokens": 400, "tools": [*tools]} | more
    return server.post(CHAT, body)


@EACH
@pytest.mark.parametrize(
    "given",
    ['a"}}', "a\nb", "a>b", "<|end|>", "</tool_call>", "a(b=1)", "a b", "", "é", "a" * 65, "a\u2028", "functions.x y"],
)
def test_names_with_format_markers_are_rejected(servers: dict[str, LiveServer], name: str, given: str) -> None:
    for choice in ("auto", "required"):
        answer = ask(servers[name], tool("ok"), tool(given), tool_choice=choice)
        assert (answer.status, answer.error["param"]) == (400, "tools[1].function.name")


REFERRED = {f"x{index}": {"$ref": "#/$defs/a"} for index in range(100)}
DOUBLED = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
SCHEMAS: dict[str, Any] = {
    "recursive": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"properties": REFERRED}}},
    "root": {"properties": {"a": {"$ref": "#"}}},
    "circular": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "doubled": {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": DOUBLED | {"d60": {"type": "string"}}},
    "wide": {"properties": {f"p{index}": {"type": "string"} for index in range(3000)}},
    "alternatives": {"properties": {"a": {"anyOf": [{"properties": {f"k{i}": {}}} for i in range(800)]}}},
    "regex": {"properties": {"a": {"type": "string", "pattern": "^(a+)+(b|c|(d{1,999}){1,999})*$"}}},
    "lengths": {"properties": {"a": {"type": "string", "minLength": 90_000, "maxLength": 100_000}}},
    "huge": {"properties": {"a": {"enum": ["x" * 1_000_000]}}},
    "numbers": {"properties": {"a": {"multipleOf": 7919}, "b": {"multipleOf": 7907}}},
    "nothing": {"properties": {"a": {"type": []}}, "required": ["a"]},
    "no list": {"properties": {"a": {"anyOf": 3, "enum": 4}}, "required": 5},
    "keys": {"properties": {'a"}': {}, "b\n": {}, "<|end|>": {}, "</arg_key>": {}}},
}


@EACH
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.timing
def test_hostile_schemas_are_answered_in_time(servers: dict[str, LiveServer], name: str, schema: str) -> None:
    for more in ({"tool_choice": "required"}, {"tool_choice": "auto", "strict": True}):
        strict = more.pop("strict", None)
        began = time.perf_counter()
        answer = ask(servers[name], tool("f", {"type": "object", **SCHEMAS[schema]}, strict=strict), **more)
        assert time.perf_counter() - began < 10
        assert answer.status in (200, 400), answer.body
        assert answer.status == 200 or answer.error["param"].startswith("tools"), answer.error


@EACH
@pytest.mark.timing
def test_others_are_served_while_a_thousand_tools_compile(servers: dict[str, LiveServer], name: str) -> None:
    tools = [tool(f"t{index}", CITY) for index in range(1000)]
    body = json.dumps({"messages": HI, "max_tokens": 1, "tools": tools, "tool_choice": "required"}).encode()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(servers[name].post(CHAT, body)))
    asking.start()
    slowest = 0.0
    while asking.is_alive():
        began = time.perf_counter()
        assert servers[name].get("/ping").status == 200
        slowest = max(slowest, time.perf_counter() - began)
        time.sleep(0.005)
    assert answers[0].status == 200, answers[0].body
    assert slowest < 1.5 * slowdown()


def joined(events: list[Any]) -> dict[str, Any]:
    """Join the events of a stream into one message."""
    reply: dict[str, Any] = {"content": "", "calls": [], "reason": None}
    for event in events[:-1]:
        [choice] = event["choices"]
        reply["content"] += choice["delta"].get("content") or ""
        reply["reason"] = choice["finish_reason"] or reply["reason"]
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                reply["calls"].append(dict(call["function"]))
            else:
                reply["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return reply


def whole(answer: Any) -> dict[str, Any]:
    [choice] = answer.json["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return {"content": choice["message"]["content"] or "", "calls": calls, "reason": choice["finish_reason"]}


@EACH
def test_call_truncated_at_any_byte_ends_cleanly(servers: dict[str, LiveServer], name: str) -> None:
    server, size = servers[name], len(TEXTS[name].encode())
    server.client.per_step = 3
    for end in range(1, size + 1):
        answer = ask(server, tool("weather", CITY), max_tokens=end)
        reply = whole(answer)
        assert reply["reason"] == "length"
        assert all(call["name"] == "weather" for call in reply["calls"])
        assert joined(ask(server, tool("weather", CITY), max_tokens=end, stream=True).events) == reply
    assert json.loads(reply["calls"][0]["arguments"]) == {"city": "Röm, 東", "days": 3}


@EACH
@pytest.mark.parametrize("per_step", [1, 2, 1000])
def test_joined_stream_equals_answer_for_any_chunking(servers: dict[str, LiveServer], name: str, per_step: int) -> None:
    servers[name].client.per_step = per_step
    reply = whole(ask(servers[name], tool("weather", CITY)))
    assert reply["reason"] == "tool_calls"
    assert joined(ask(servers[name], tool("weather", CITY), stream=True).events) == reply


@EACH
def test_stop_string_within_arguments_truncates_them(servers: dict[str, LiveServer], name: str) -> None:
    servers[name].client.per_step = 3
    answer = ask(servers[name], tool("weather", CITY), stop=[", 東"])
    [choice] = answer.json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ", 東")
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Röm'


@EACH
def test_values_that_look_like_control_tokens_stay_text(servers: dict[str, LiveServer], name: str) -> None:
    schema = {"type": "object", "properties": {"é x" if name in ("hermes", "gpt_oss") else "e": {"enum": ["<|end|>"]}}}
    answer = ask(servers[name], tool("f", schema), tool_choice="required", max_tokens=1)
    assert answer.status == 200, answer.body
    assert name == "gpt_oss" or "<[256]>" not in servers[name].client.specs[-1].params.grammar


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "http://127.0.0.1/x"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}


@pytest.mark.parametrize("part", [IMAGE, AUDIO, VIDEO, {"type": "file", "file": {"file_id": "x"}}])
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_chat_rejects_non_text_parts(servers: dict[str, LiveServer], part: Any, role: str) -> None:
    content = [{"type": "text", "text": "What is it?"}, part]
    answer = servers["hermes"].post(CHAT, {"messages": [{"role": role, "content": content}, *HI]})
    field = "image_url.url" if part is IMAGE else "type"
    assert (answer.status, answer.error["param"]) == (400, f"messages[0].content[1].{field}")
    assert ("this model takes no images" if part is IMAGE else part["type"]) in answer.error["message"]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]},
            "input[0].content[0].image_url",
        ),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio", "data": "x"}]}, "input[0].content[0].type"),
        (
            {
                "type": "function_call_output",
                "call_id": "x",
                "output": [{"type": "input_image", "image_url": "data:x"}],
            },
            "input[0].output[0].image_url",
        ),
    ],
)
def test_responses_reject_non_text_parts(servers: dict[str, LiveServer], item: Any, field: str) -> None:
    answer = servers["hermes"].post("/v1/responses", {"input": [item]})
    assert (answer.status, answer.error["param"]) == (400, field), answer.body


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "image", "source": SOURCE}, "messages[0].content[0].source.data"),
        ({"type": "document", "source": SOURCE}, "messages[0].content[0].type"),
        (
            {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": SOURCE}]},
            "messages[0].content[0].content[0].source.data",
        ),
    ],
)
def test_messages_reject_non_text_parts(servers: dict[str, LiveServer], block: Any, field: str) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": [block]}]}
    for path, more in (("/v1/messages", {"max_tokens": 5}), ("/v1/messages/count_tokens", {})):
        answer = servers["hermes"].post(path, body | more)
        assert answer.status == 400
        assert field in answer.json["error"]["message"], answer.body
