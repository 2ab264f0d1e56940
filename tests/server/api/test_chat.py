"""POST /v1/chat/completions."""

from __future__ import annotations

import re

import pytest

from tests.server.fakes import LiveServer

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def prompt_of(server: LiveServer, index: int = -1) -> str:
    return bytes(server.client.specs[index].prompt).decode()


def test_answer_has_openai_format(server: LiveServer) -> None:
    server.client.cached_tokens = 7
    answer = server.post(PATH, HELLO, X_Request_Id="abc-1")
    assert answer.status == 200
    assert answer.headers["x-request-id"] == "abc-1"
    body = answer.json
    assert body["id"] == "chatcmpl-abc-1"
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert re.fullmatch("fp_[0-9a-f]{12}", body["system_fingerprint"])
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "weight_version": "0",
        }
    ]
    prompt = len("user: hi\nassistant: ")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 14,
        "total_tokens": prompt + 14,
        "prompt_tokens_details": {"cached_tokens": 7},
    }


def test_joined_stream_equals_the_whole_answer(server: LiveServer) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    answer = server.post(PATH, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, usage, done = answer.events
    assert done == "[DONE]"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 14
    assert all(event["usage"] is None for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "Hello, world!"
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("at_the_end", [True, False])
def test_every_event_may_report_usage_so_far(server: LiveServer, n: int, at_the_end: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": at_the_end}
    body = {**HELLO, "n": n, "stream": True, "stream_options": options}
    *events, done = server.post(PATH, body).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert done == "[DONE]" and counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 14 * n) or n == 2
    assert counts[-1] == 14 * n
    assert {event["usage"]["prompt_tokens"] for event in events} == {len(server.client.specs[0].prompt)}
    assert (events[-1]["choices"] == []) == at_the_end
    fingerprint = server.post(PATH, HELLO).json["system_fingerprint"]
    assert {event["system_fingerprint"] for event in events} == {fingerprint}


def test_stream_omits_usage_unless_requested(server: LiveServer) -> None:
    events = server.post(PATH, {**HELLO, "stream": True}).events
    assert all("usage" not in event for event in events[:-1])


def test_default_max_tokens_is_the_remaining_context(server: LiveServer) -> None:
    server.post(PATH, HELLO)
    spec = server.client.specs[-1]
    assert spec.params.max_tokens == 400 - len(spec.prompt)


def test_all_fields_reach_the_engine(server: LiveServer) -> None:
    fields = {
        "max_completion_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.5,
        "logit_bias": {"65": -3, "66": 0},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "priority": -2,
        "user": "ann",
        "cache_salt": "pepper",
    }
    assert server.post(PATH, {**HELLO, **fields}).status == 200
    spec = server.client.specs[-1]
    assert (spec.priority, spec.tenant, spec.cache_salt, spec.eos_token_ids) == (-2, "ann", "pepper", (256,))
    params = spec.params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p) == (5, 2, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.seed, params.repetition_penalty) == (4, 0.1, 11, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.logit_bias, params.stop_token_ids, params.ignore_eos) == ({65: -3.0}, (9,), True)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_own_seeds_and_prompt_is_counted_once(server: LiveServer, stream: bool) -> None:
    body = {**HELLO, "n": 3, "seed": 5, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = server.post(PATH, body)
    seeds = [spec.params.seed for spec in server.client.specs]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    if stream:
        texts = {0: "", 1: "", 2: ""}
        for event in answer.events[:-2]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
        usage = answer.events[-2]["usage"]
    else:
        texts = {choice["index"]: choice["message"]["content"] for choice in answer.json["choices"]}
        usage = answer.json["usage"]
    assert texts == dict.fromkeys(range(3), "Hello, world!")
    assert usage["completion_tokens"] == 42
    assert usage["prompt_tokens"] == len(server.client.specs[0].prompt)


@pytest.mark.parametrize("per_step", [1, 3, 50])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_text_and_usage_and_aborts_rest(server: LiveServer, per_step: int, stream: bool) -> None:
    server.client.per_step = per_step
    body = {**HELLO, "stop": [", w", "zzz"], "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = server.post(PATH, body)
    if stream:
        choices = [event["choices"][0] for event in answer.events[:-2]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        last, usage = choices[-1], answer.events[-2]["usage"]
    else:
        last, usage = answer.json["choices"][0], answer.json["usage"]
        text = last["message"]["content"]
    assert text == "Hello"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", ", w")
    assert usage["completion_tokens"] == len("Hello, w")
    assert server.client.active_requests == 0 or server.client.aborts
    assert len(server.client.aborts) == (0 if per_step == 50 else 1)


def test_stop_string_may_be_included_in_the_text(server: LiveServer) -> None:
    answer = server.post(PATH, {**HELLO, "stop": "wor", "include_stop_str_in_output": True})
    assert answer.json["choices"][0]["message"]["content"] == "Hello, wor"


def test_stop_token_is_named_and_not_included(server: LiveServer) -> None:
    choice = server.post(PATH, {**HELLO, "stop_token_ids": [ord(",")]}).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "stop")
    assert choice["stop_reason"] == ord(",")


def test_finish_reason_length(server: LiveServer) -> None:
    choice = server.post(PATH, {**HELLO, "max_tokens": 3}).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hel", "length")


def test_character_truncated_by_length_becomes_a_replacement(server: LiveServer) -> None:
    server.client.reply = lambda _: "aé".encode()
    choice = server.post(PATH, {**HELLO, "max_tokens": 2}).json["choices"][0]
    assert choice["message"]["content"] == "a�"


def test_no_event_splits_a_character_or_a_line(server: LiveServer) -> None:
    text = 'é\u2028日本\u0085😀\n\n"data: x"'
    server.client.reply = lambda _: text.encode()
    answer = server.post(PATH, {**HELLO, "stream": True})
    pieces = [event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]]
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)
    for separator in ("\u2028", "\u0085"):
        assert separator not in answer.body.decode()


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_token_bytes_and_top_candidates(server: LiveServer, stream: bool) -> None:
    server.client.reply = lambda _: "é".encode()
    body = {**HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 2, "stream": stream}
    answer = server.post(PATH, body)
    if stream:
        content = [e for event in answer.events[1:-1] for e in event["choices"][0]["logprobs"]["content"]]
    else:
        content = answer.json["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["logprob"] == -0.5
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["A", "B"]
    assert content[0]["top_logprobs"][0]["logprob"] == -9999.0


def test_token_ids_are_returned_on_request(server: LiveServer) -> None:
    choice = server.post(PATH, {**HELLO, "return_token_ids": True, "max_tokens": 2}).json["choices"][0]
    assert choice["token_ids"] == list(b"He")
    assert bytes(choice["prompt_token_ids"]) == b"user: hi\nassistant: "
    events = server.post(PATH, {**HELLO, "return_token_ids": True, "max_tokens": 2, "stream": True}).events[:-1]
    assert bytes(events[0]["choices"][0]["prompt_token_ids"]) == b"user: hi\nassistant: "
    assert [i for event in events[1:] for i in event["choices"][0]["token_ids"]] == list(b"He")


def test_parts_roles_and_template_arguments_reach_the_template(server: LiveServer) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "function_call": None},
        ],
        "chat_template_kwargs": {"speaker": "bot"},
    }
    assert server.post(PATH, body).status == 200
    assert prompt_of(server) == "system: be brief\nuser: a\nb\nassistant: c\nbot: "
    server.post(PATH, {**HELLO, "add_generation_prompt": False})
    assert prompt_of(server) == "user: hi\n"


def test_harmless_fields_are_accepted_and_unknown_ones_named(server: LiveServer) -> None:
    body = {**HELLO, "parallel_tool_calls": True, "metadata": {"a": "b"}, "temprature": 1, "bad name": 2}
    body |= {"tools": [], "response_format": {"type": "text"}, "store": False, "tool_choice": "none"}
    answer = server.post(PATH, body)
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"] == "temprature"
    assert "x-ignored-fields" not in server.post(PATH, HELLO).headers
