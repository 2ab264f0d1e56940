"""Ollama's API: lines of JSON, options, tools, errors, and the descriptions of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fd_core.http.access.control import ROUTES
from fd_core.server.ollama import schemas
from fd_core.server.ollama.routes import as_chat
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.thinking import DeepSeekR1Reasoning, QwenReasoning
from tests.clients.conftest import fake
from tests.server.fakes import Answer, LiveServer, live

HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def thinking() -> Iterator[LiveServer]:
    with live(fake, parsers=Parsers(HermesTools, QwenReasoning), served_model_names=("scripted",)) as server:
        yield server


def ask(server: LiveServer, path: str, **body: Any) -> Answer:
    name = server.get("/v1/models").json["data"][0]["id"]
    return server.post(path, {"model": name, **body})


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.splitlines()]


def test_chat_streams_lines_by_default(server: LiveServer) -> None:
    found = lines(ask(server, "/api/chat", messages=HI))
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert "".join(line["message"]["content"] for line in found) == "Hello, world!"
    assert {line["message"]["role"] for line in found} == {"assistant"}
    assert found[-1]["done_reason"] == "stop"
    assert found[-1]["eval_count"] > 0 and found[-1]["prompt_eval_count"] > 0 and found[-1]["total_duration"] > 0


def test_whole_answer_equals_the_stream(server: LiveServer) -> None:
    whole = ask(server, "/api/generate", prompt="hi", stream=False).json
    stream = lines(ask(server, "/api/generate", prompt="hi"))
    assert whole["response"] == "".join(line["response"] for line in stream) == "Hello, world!"
    assert whole["eval_count"] == stream[-1]["eval_count"]


def test_raw_prompt_is_read_as_it_is(server: LiveServer) -> None:
    ask(server, "/api/generate", prompt="One, two,", raw=True, stream=False)
    assert bytes(server.client.specs[-1].prompt).decode() == "One, two,"


def test_text_of_a_raw_prompt_is_no_reasoning() -> None:
    with live(fake, parsers=Parsers(None, DeepSeekR1Reasoning), served_model_names=("scripted",)) as server:
        server.client.reply = lambda _: b" there was"
        answer = ask(server, "/api/generate", prompt="Once upon a time", raw=True, stream=False).json
    assert (answer["response"], answer.get("thinking")) == (" there was", None)


def test_options_become_sampling_parameters(server: LiveServer) -> None:
    options = {"num_predict": 5, "temperature": 0.5, "top_k": 7, "repeat_penalty": 1.5, "seed": 3, "stop": ["w"]}
    answer = ask(server, "/api/chat", messages=HI, options={**options, "num_ctx": 99}, stream=False).json
    params = server.client.specs[-1].params
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (5, 0.5, 7, 3)
    assert params.repetition_penalty == 1.5
    assert answer["done_reason"] == "length"


def test_empty_request_reports_that_the_model_is_loaded(server: LiveServer) -> None:
    assert ask(server, "/api/generate").json["done_reason"] == "load"
    assert ask(server, "/api/chat").json["message"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls_have_fields(thinking: LiveServer, stream: bool) -> None:
    answer = ask(thinking, "/api/chat", messages=HI, tools=[WEATHER], stream=stream)
    messages = [line["message"] for line in (lines(answer) if stream else [answer.json])]
    assert "".join(message.get("thinking", "") for message in messages).strip() == "Hm."
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert calls == [{"function": {"name": "weather", "arguments": {"city": "Röm"}}}]
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    turns = [*HI, {"role": "assistant", "content": "", "tool_calls": calls}, result]
    second = ask(thinking, "/api/chat", messages=turns, tools=[WEATHER], stream=False).json
    assert second["message"]["content"] == "It is sunny in Röm."


@pytest.mark.parametrize("stream", [False, True])
def test_call_that_was_cut_off_is_not_shown(thinking: LiveServer, stream: bool) -> None:
    whole = ask(thinking, "/api/chat", messages=HI, tools=[WEATHER], stream=False).json
    for most, shown in ((whole["eval_count"] - 20, 0), (whole["eval_count"] - 2, 1)):
        options = {"num_predict": most}
        answer = ask(thinking, "/api/chat", messages=HI, tools=[WEATHER], options=options, stream=stream)
        messages = [line["message"] for line in (lines(answer) if stream else [answer.json])]
        assert len([call for message in messages for call in message.get("tool_calls", [])]) == shown


def test_result_answers_the_call_of_its_tool_name() -> None:
    called = [schemas.TurnCall(function=schemas.CalledFunction(name=name)) for name in ("a", "b", "a")]
    turns = [schemas.ChatTurn(role="assistant", content="", tool_calls=called)]
    for name in ("b", "a", None):
        turns.append(schemas.ChatTurn(role="tool", content="", tool_name=name))
    messages = as_chat(
        SimpleNamespace(prompt_reader=None), schemas.OllamaChatRequest(model="m", messages=turns)
    ).messages
    assert [(each.tool_call_id, each.name) for each in messages or ()][1:] == [
        ("call_1", "b"),
        ("call_0", "a"),
        ("call_2", None),
    ]


@pytest.mark.parametrize(
    ("template", "think", "prompt"),
    [
        ("{{ enable_thinking }}", True, b"True"),
        ("{{ enable_thinking }}", "high", b"True"),
        ("{{ enable_thinking }}", False, b"False"),
        ("{{ enable_thinking }}", "none", b"False"),
        ("effort {{ reasoning_effort }}", "high", b"effort high"),
        ("effort {{ reasoning_effort }}", True, b"effort "),
        ("chat", False, b"chat"),
        ("chat", "none", b"chat"),
    ],
)
def test_think_reaches_templates_that_use_it(template: str, think: bool | str, prompt: bytes) -> None:
    with live(template=ChatTemplate(template)) as server:
        assert ask(server, "/api/chat", messages=HI, think=think, stream=False).status == 200
        assert bytes(server.client.specs[-1].prompt) == prompt


@pytest.mark.parametrize("think", [True, "high"])
def test_think_is_refused_by_a_model_that_does_not_reason(server: LiveServer, think: bool | str) -> None:
    answer = ask(server, "/api/chat", messages=HI, think=think)
    assert answer.status == 400 and "does not support thinking" in answer.json["error"]


@pytest.mark.parametrize("form", ["json", {"type": "object"}])
def test_format_constrains_the_answer(thinking: LiveServer, form: Any) -> None:
    answer = ask(thinking, "/api/chat", messages=HI, format=form, stream=False).json
    assert json.loads(answer["message"]["content"]) == {"name": "Ada", "age": 36}


@pytest.mark.parametrize(
    "path, body, status, text",
    [
        ("/api/chat", {"model": "absent", "messages": HI}, 404, "the model 'absent' does not exist"),
        ("/api/chat", {"messages": HI, "options": {"temperature": 9}}, 400, "options.temperature: expected"),
        ("/api/chat", {"messages": HI, "options": {"num_predict": 10**6}}, 400, "lower options.num_predict"),
        (
            "/api/chat",
            {"messages": [{**HI[0], "images": ["abc"]}]},
            400,
            "messages[0].images[0]: this model takes no images",
        ),
        ("/api/chat", {"messages": [{"role": "unknown"}]}, 400, "messages[0].role"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ("/api/generate", {"prompt": "a", "options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ("/api/generate", {"prompt": "a", "options": {"typical_p": 0.3}}, 400, "options.typical_p is not supported"),
        ("/api/chat", {"messages": HI, "options": {"repeat_last_n": 8}}, 400, "options.repeat_last_n is not supported"),
        ("/api/chat", {"messages": HI, "logprobs": True}, 400, "logprobs is not supported"),
        ("/api/embed", {"input": "a" * 450, "truncate": False}, 400, "input: a text has 450 tokens"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system is not supported"),
        ("/api/generate", {"prompt": "a", "raw": True, "images": ["abc"]}, 400, "images is not supported"),
        ("/api/generate", {"prompt": "a", "format": {"type": "object", "not": {}}}, 400, "format"),
        ("/api/pull", {}, 404, "of Ollama's API, the server has"),
    ],
)
def test_error_is_a_text_that_names_the_field(
    server: LiveServer, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    answer = ask(server, path, **body)
    assert answer.status == status
    assert text in answer.json["error"]


def test_failure_in_the_stream_is_a_line(server: LiveServer) -> None:
    server.client.fail_after = 3
    assert lines(ask(server, "/api/chat", messages=HI))[-1].keys() == {"error"}


def test_body_needs_no_content_type(server: LiveServer) -> None:
    form = "application/x-www-form-urlencoded"  # what curl sends without a header
    name = server.get("/v1/models").json["data"][0]["id"]
    answer = server.post("/api/generate", {"model": name, "prompt": "hi", "stream": False}, content_type=form)
    assert answer.json["response"] == "Hello, world!"


def test_vectors_have_length_one(server: LiveServer) -> None:
    answer = ask(server, "/api/embed", input=["one", "two"]).json
    assert [sum(x * x for x in vector) for vector in answer["embeddings"]] == pytest.approx([1, 1])


def test_long_text_loses_its_end_unless_refused(server: LiveServer) -> None:
    longest = server.client.info.max_model_len - 1
    for truncate in ({}, {"truncate": True}, {"truncate": None}):
        answer = ask(server, "/api/embed", input=["a" * (longest + 9), "b"], **truncate)
        assert answer.status == 200, answer.body
        assert answer.json["prompt_eval_count"] == longest + 1


def test_model_is_listed_and_described(thinking: LiveServer) -> None:
    for path in ("/api/tags", "/api/ps"):
        assert [each["name"] for each in thinking.get(path).json["models"]] == ["scripted"]
    about = thinking.post("/api/show", {"model": "scripted:latest"}).json
    assert about["capabilities"] == ["completion", "tools", "thinking"]
    assert about["model_info"]["general.architecture"] == about["details"]["family"]
    assert thinking.get("/api/version").json["version"]


def test_every_endpoint_needs_a_key_but_the_version() -> None:
    rights = {path: route.right for path, route in ROUTES.items() if path.startswith("/api/")}
    assert {path for path, right in rights.items() if right != "key"} == {"/api/version"}
