"""Every bad request gets an error in OpenAI's format that names field and limit."""

from __future__ import annotations

import http.client
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from fd_core.errors import EngineDead
from fd_core.http.errors import to_api_error
from fd_core.types import RequestSpec
from tests.server.fakes import FakeClient, LiveServer, live
from tests.server.stream.test_disconnect import eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "param", "expected"),
    [
        (TEXT, {}, "prompt", "required"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": []}, "prompt", "empty"),
        (TEXT, {"prompt": [[]]}, "prompt", "empty"),
        (TEXT, {"prompt": ["a", ""]}, "prompt[1]", "empty"),
        (TEXT, {"prompt": ["a", 1]}, "prompt", "mixes"),
        (TEXT, {"prompt": 5}, "prompt", "expected"),
        (TEXT, {"prompt": [-1]}, "prompt", "-1"),
        (TEXT, {"prompt": [257]}, "prompt", "257 ids"),
        (TEXT, {"prompt": [[1], [2**40]]}, "prompt[1][0]", "<="),
        (TEXT, {"prompt": [2**70]}, "prompt", "257 ids"),
        (TEXT, {"prompt": ["a"] * 129}, "prompt", "128"),
        (TEXT, {"prompt": ["a", "b"], "n": 65}, "n", "130"),
        (TEXT, {"prompt": "a" * 400}, "prompt", "400 tokens"),
        (TEXT, {"prompt": "a" * 100, "max_tokens": 301}, "max_tokens", "at most 300"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "requires echo"),
        (TEXT, {"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "min_tokens", "4 tokens"),
        (TEXT, {"prompt": "a", "n": 0}, "n", ">= 1"),
        (TEXT, {"prompt": "a", "n": 129}, "n", "<= 128"),
        (TEXT, {"prompt": "a", "n": 1.5}, "n", "int"),
        (TEXT, {"prompt": "a", "n": "1"}, "n", "int"),
        (TEXT, {"prompt": "a", "temperature": 2.1}, "temperature", "<= 2.0"),
        (TEXT, {"prompt": "a", "temperature": -0.1}, "temperature", ">= 0.0"),
        (TEXT, {"prompt": "a", "top_p": -0.1}, "top_p", ">= 0.0"),
        (TEXT, {"prompt": "a", "min_p": 1.1}, "min_p", "<= 1.0"),
        (TEXT, {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "<= 2.0"),
        (TEXT, {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty", ">= -2.0"),
        (TEXT, {"prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty", ">= 0.01"),
        (TEXT, {"prompt": "a", "seed": 2**64}, "seed", "64 bits"),
        (TEXT, {"prompt": "a", "logit_bias": {"257": 1}}, "logit_bias", "257 ids"),
        (TEXT, {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", "-1"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "key"),
        (TEXT, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias[...]", "<= 100.0"),
        (TEXT, {"prompt": "a", "stop": ["a", ""]}, "stop[1]", "length >= 1"),
        (TEXT, {"prompt": "a", "min_tokens": 1, "min_new_tokens": 2}, "min_new_tokens", "only one"),
        (TEXT, {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "only one"),
        (TEXT, {"prompt": "a", "allowed_token_ids": [257]}, "allowed_token_ids", "257 ids"),
        (TEXT, {"prompt": "a", "allowed_token_ids": [1], "bad_words_token_ids": [1]}, "allowed_token_ids", "banned"),
        (TEXT, {"prompt": "a", "allowed_token_ids": [256], "min_tokens": 1}, "allowed_token_ids", "stop tokens"),
        (TEXT, {"prompt": "a", "bad_words_token_ids": [[1, 257]]}, "bad_words_token_ids", "257 ids"),
        (TEXT, {"prompt": "a", "bad_words_token_ids": [[]]}, "bad_words_token_ids[0]", "length >= 1"),
        (TEXT, {"prompt": "a", "bad_words": [""]}, "bad_words[0]", "length >= 1"),
        (TEXT, {"prompt": "a", "bad_words": ["a"] * 1025}, "bad_words", "length <= 1024"),
        (TEXT, {"prompt": "a", "bad_words": ["a" * 200] * 41}, "bad_words", "8,192"),
        (TEXT, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        (TEXT, {"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
        (TEXT, {"prompt": "a", "truncation_side": "middle"}, "truncation_side", "middle"),
        (TEXT, {"prompt_token_ids": []}, "prompt_token_ids", "empty"),
        (TEXT, {"prompt_token_ids": [300]}, "prompt_token_ids", "257 ids"),
        (TEXT, {"prompt": "a", "tools": [{"type": "function"}]}, "tools", "/v1/chat/completions"),
        (TEXT, {"prompt": "a", "lora_path": "x"}, "lora_path", "adapter"),
        (TEXT, {"prompt": "a", "top_logprobs": 2}, "top_logprobs", "logprobs is"),
        (TEXT, {"prompt": "a", "stop": ["a"] * 17}, "stop", "at most 16"),
        (TEXT, {"prompt": "a", "stop": ["a" * 257]}, "stop[0]", "256"),
        (TEXT, {"prompt": "a", "stop_token_ids": [257]}, "stop_token_ids", "257"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs", "<= 20"),
        (TEXT, {"prompt": "a", "logprobs": True}, "logprobs", "int"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of", "n is 1"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
        (TEXT, {"prompt": "a", "cache_salt": ""}, "cache_salt", "length >= 1"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (CHAT, {}, "messages", "required"),
        (CHAT, {"messages": []}, "messages", "at least one"),
        (CHAT, {"messages": [], "prompt_token_ids": [257]}, "prompt_token_ids", "257 ids"),
        (CHAT, {"messages": HI, "chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
        (CHAT, {"messages": HI, "documents": [{"text": "x"}]}, "documents", "does not support"),
        (CHAT, {"messages": HI * 2, "disable_chat_template": True}, "messages", "exactly one"),
        (
            CHAT,
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "only one",
        ),
        (CHAT, {"messages": [{**HI[0], "prefix": True}]}, "messages[].prefix", "continue_final_message"),
        (CHAT, {"messages": [{**HI[0], "audio": {"id": "x"}}]}, "messages[].audio", "text"),
        (CHAT, {"messages": "hi"}, "messages", "array"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        (CHAT, {"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "expected"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url.url",
            "takes no images",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
            "object",
        ),
        (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function", "required"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice", "tools is empty"),
        (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        (CHAT, {"messages": HI, "guided_json": "{"}, "guided_json", "invalid JSON"),
        (CHAT, {"messages": HI, "audio": {"voice": "x"}}, "audio", "text"),
        (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, "modalities", "text"),
        (CHAT, {"messages": HI, "functions": [{}]}, "functions", "use tools"),
        (CHAT, {"messages": HI, "store": True}, "store", "not stored"),
        (CHAT, {"messages": HI, "logprobs": 3}, "logprobs", "bool"),
        (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs", "requires logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        (CHAT, {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "only one"),
        (CHAT, {"messages": HI, "max_completion_tokens": 400}, "max_completion_tokens", "at most 380"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 400}]}, "messages", "context length is 400"),
        (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ("/tokenize", {}, "prompt", "either"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "either"),
        ("/detokenize", {"tokens": [257]}, "tokens", "257"),
        ("/detokenize", {"tokens": [-9]}, "tokens[0]", ">= 0"),
        ("/v1/abort_requests", {}, "req_ids", "abort_all"),
        ("/v1/abort_requests", {"abort_all": False}, "req_ids", "abort_all"),
        ("/v1/abort_requests", {"abort_all": True, "req_ids": ["a"]}, "req_ids", "either"),
        ("/v1/abort_requests", {"abort_all": 1}, "abort_all", "bool"),
    ],
)
def test_invalid_value_is_rejected_by_name(server: LiveServer, path: str, body: Any, param: str, expected: str) -> None:
    answer = server.post(path, body)
    error = answer.error
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert expected in error["message"]
    assert not server.client.specs


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt":"a"} x']
    + [b'{"prompt": "a", "temperature": %s}' % number for number in (b"1e999", b"Infinity", b"-NaN")]
    + [b'{"prompt": "a", "metadata": ' + b"[" * 100_000],
)
def test_malformed_bodies_are_rejected(server: LiveServer, body: bytes) -> None:
    answer = server.post("/v1/completions", body)
    assert answer.status == 400
    assert answer.error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_other_content_types_are_rejected(server: LiveServer, kind: str) -> None:
    answer = server.post("/v1/completions", b'{"prompt": "a"}', content_type=kind)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


def test_charset_and_json_suffix_are_accepted(server: LiveServer) -> None:
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert server.post("/v1/completions", b'{"prompt": "a"}', content_type=kind).status == 200


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "/chat/completions",
            "path '/chat/completions'; paths of OpenAI's API start with /v1: add it to the",
        ),
        ("/v1/v1/completions", "/v1 is duplicated"),
        ("//v1/chat/completions", "remove the trailing slash of the client's base URL"),
        ("/v1//chat/completions", "remove the trailing slash of the client's base URL"),
        ("/v1", "which is a base URL; use a path below it"),
        ("/v1/audio/speech", "unknown path '/v1/audio/speech'"),
        ("/" + "x" * 5000, "unknown path '/xxx"),
    ],
)
def test_unknown_path_suggests_the_likely_one(server: LiveServer, path: str, words: str) -> None:
    answer = server.post(path, {})
    assert answer.status == 404 and words in answer.error["message"]
    assert len(answer.error["message"]) < 300


def test_unknown_paths_methods_and_models(server: LiveServer) -> None:
    assert (server.get("/v1/nothing").status, server.get("/v1/nothing").error["param"]) == (404, None)
    answer = server.get("/v1/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "OPTIONS, POST")
    assert answer.error["type"] == "invalid_request_error"
    for missing in (
        server.post("/v1/completions", {"prompt": "a", "model": "gpt"}),
        server.post("/v1/chat/completions", {"messages": HI, "model": "gpt"}),
        server.get("/v1/models/gpt"),
    ):
        assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "model_not_found", "model")


def test_oversized_body_is_rejected_before_reading() -> None:
    with live(max_body_bytes=1000) as server:
        announced = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        announced.putrequest("POST", "/v1/completions")
        announced.putheader("content-type", "application/json")
        announced.putheader("content-length", str(10**12))
        announced.endheaders()
        answer = announced.getresponse()
        assert answer.status == 413
        assert b"1,000 bytes" in answer.read()
        announced.close()
        chunked = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        parts = (b"x" * 400 for _ in range(4))
        chunked.request("POST", "/v1/completions", parts, {"content-type": "application/json"}, encode_chunked=True)
        assert chunked.getresponse().status == 413
        chunked.close()
        assert server.post("/v1/completions", {"prompt": "a"}).status == 200


def test_full_queue_is_503_with_retry_after() -> None:
    with live(lambda: FakeClient(max_num_seqs=1), max_queued_requests=1) as server:
        answer = server.post("/v1/completions", {"prompt": "a", "n": 3})
        assert (answer.status, answer.error["code"]) == (503, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert not server.client.specs
        assert server.post("/v1/completions", {"prompt": "a", "n": 2}).status == 200


def test_dead_engine_is_503_on_every_relevant_route() -> None:
    with live() as server:
        server.call(server.client.die)
        for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HI}), (CHAT, {"messages": HI, "stream": True})):
            answer = server.post(path, body)
            assert (answer.status, answer.error["code"]) == (503, "engine_dead")
        assert server.post("/v1/abort_requests", {"abort_all": True}).status == 503
        assert server.get("/health").status == server.get("/ready").status == 503
        assert server.get("/metrics").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_has_an_error_status(server: LiveServer, stream: bool) -> None:
    server.client.fail_after = 0
    answer = server.post(TEXT, {"prompt": "a", "stream": stream})
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert "a row failed" in answer.error["message"]


@pytest.mark.parametrize("n", [1, 3])
def test_failure_within_a_stream_is_an_error_event_without_done(server: LiveServer, n: int) -> None:
    server.client.fail_after = 3
    answer = server.post(TEXT, {"prompt": "a", "stream": True, "n": n})
    assert answer.status == 200
    assert set(answer.events[-1]) == {"error"}
    assert b"event: error\n" in answer.body and b"[DONE]" not in answer.body
    assert server.call(lambda: server.client.active_requests) == 0


def test_engine_death_within_a_stream_is_an_error_event() -> None:
    with live() as server:
        server.client.pause_after = 5
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, CHAT, {"messages": HI, "stream": True})
            eventually(lambda: any(done == 5 for _, done in server.client.live.values()))
            server.call(server.client.die)
            answer = running.result()
        assert answer.events[-1]["error"]["code"] == "engine_dead"
        assert b"[DONE]" not in answer.body


def test_unexpected_error_leaks_nothing_to_client_or_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        prompt = "a secret"
        try:
            raise KeyError(prompt)
        except KeyError as error:
            answer = to_api_error(error)
    assert (answer.status, answer.kind) == (500, "server_error")
    assert "secret" not in answer.message
    assert "secret" not in caplog.text
    assert "KeyError" in caplog.text and "test_errors.py" in caplog.text


def test_unexpected_exception_is_a_500_in_openai_format(server: LiveServer) -> None:
    def broken(_: object) -> bytes:
        raise AssertionError("not reached")

    original = server.client.submit
    server.client.submit = broken
    try:
        answer = server.post(TEXT, {"prompt": "a"})
    finally:
        server.client.submit = original
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert "x-request-id" in answer.headers


def test_endless_header_is_rejected(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        answer = b""
        with suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"a" * 10_000)
        with suppress(ConnectionError):
            answer = connection.recv(65536)
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    for _ in range(3):
        assert server.get("/health", x_long="a" * 50_000).status == 200


def test_header_limit_applies_per_request_of_a_connection(server: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for _ in range(4):
        connection.request("GET", "/health", headers={"x-long": "a" * 40_000})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    connection.close()


def test_failed_submission_leaves_no_request_running(server: LiveServer) -> None:
    client = server.client
    original, count = client.submit, 0

    def submit(spec: RequestSpec) -> object:
        nonlocal count
        count += 1
        if count == 3:
            raise EngineDead("died in between")
        return original(spec)

    client.held = True
    client.submit = submit
    try:
        answer = server.post(TEXT, {"prompt": "a", "n": 4})
    finally:
        client.submit = original
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    assert sorted(client.aborts) == sorted(spec.request_id for spec in client.specs)
    assert len(client.aborts) == 2


CHANGES_THE_ANSWER = {
    **dict.fromkeys(("guided_decoding_backend", "stop_regex", "lora_path", "extra_key"), "x"),
    **dict.fromkeys(("no_stop_trim", "return_hidden_states", "use_beam_search"), True),
    **dict.fromkeys(("reasoning_max_tokens", "max_new_tokens", "response_max_tokens"), 7),
    **{key: {"x": 1} for key in ("repetition_detection", "kv_transfer_params", "vllm_xargs", "custom_params")},
    "moderation": {"model": "omni-moderation-latest"},
    **{key: [1] for key in ("logprob_token_ids", "completion_token_ids")},
    **dict.fromkeys(("temp_scaled_logprobs", "top_p_normalized_logprobs"), True),
    **dict.fromkeys(("typical_p", "repeat_penalty", "mirostat", "bootstrap_room"), 2),
    **dict.fromkeys(
        ("watermarking", "json_mode", "return_prompt_token_ids", "return_meta_info", "enable_search"), True
    ),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning", "detokenize"), False),
    **dict.fromkeys(("random_seed", "sampling_seed", "min_length", "max_length", "max_output_tokens", "n_probs"), 7),
    **dict.fromkeys(("thinking_budget", "num_return_sequences", "dynatemp_range", "penalty_alpha"), 7),
    **{key: {"x": 1} for key in ("thinking", "reasoning", "extra_body", "sampling_params", "parameters", "options")},
    **{key: ["x"] for key in ("stop_sequences", "stop_words", "banned_strings", "samplers", "lora", "input_ids")},
}
OTHER_APIS = {
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "fake", "max_tokens": 9, "messages": HI},
}
CHATS_ONLY = {
    **dict.fromkeys(("seed", "min_tokens", "n", "reasoning_max_tokens", "max_completion_tokens"), 0),
    **dict.fromkeys(("stop", "guided_regex", "regex", "chat_template"), "x"),
    **dict.fromkeys(("min_p", "presence_penalty", "repetition_penalty"), 0.5),
    **dict.fromkeys(("ignore_eos", "logprobs", "continue_final_message", "use_beam_search", "echo"), True),
    **{key: {"x": 1} for key in ("structured_outputs", "response_format", "logit_bias", "kv_transfer_params")},
    **{key: [1] for key in ("allowed_token_ids", "stop_token_ids", "bad_words", "documents", "prompt_token_ids")},
    **dict.fromkeys(("skip_special_tokens", "include_reasoning", "add_generation_prompt"), False),
}


@pytest.mark.parametrize("field", CHANGES_THE_ANSWER)
@pytest.mark.parametrize("path, body", [(TEXT, {"prompt": "a"}), (CHAT, {"messages": HI})])
def test_field_that_changes_the_answer_is_never_ignored(
    server: LiveServer, path: str, body: dict[str, Any], field: str
) -> None:
    answer = server.post(path, {**body, field: CHANGES_THE_ANSWER[field]})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, field, "unsupported_parameter")
    assert server.post(path, {**body, field: None}).status == 200


@pytest.mark.parametrize("field", CHATS_ONLY)
@pytest.mark.parametrize("path", OTHER_APIS)
def test_chat_only_field_is_rejected_by_other_apis(server: LiveServer, path: str, field: str) -> None:
    answer = server.post(path, {**OTHER_APIS[path], field: 1 if field == "min_tokens" else CHATS_ONLY[field]})
    assert answer.status == 400
    assert f"{field} is not supported: " in answer.json["error"]["message"]
    assert server.post(path, {**OTHER_APIS[path], field: None}).status == 200


@pytest.mark.parametrize("path", OTHER_APIS)
def test_neutral_values_are_accepted_by_other_apis(server: LiveServer, path: str) -> None:
    nothing = {
        "n": 1,
        "stop": [],
        "logit_bias": {},
        "ignore_eos": False,
        "repetition_penalty": 1.0,
        "guided_regex": "",
        "response_format": {"type": "text"},
        "skip_special_tokens": True,
        "include_reasoning": True,
    }
    answer = server.post(path, OTHER_APIS[path] | nothing)
    assert answer.status == 200, answer.body
    assert "x-ignored-fields" not in answer.headers


@pytest.mark.parametrize("path", OTHER_APIS)
def test_salt_and_template_variables_apply_to_every_api(server: LiveServer, path: str) -> None:
    mine = {"cache_salt": "mine", "chat_template_kwargs": {"speaker": "Ada"}, "priority": 3}
    assert server.post(path, OTHER_APIS[path] | mine).status == 200
    spec = server.client.specs[-1]
    assert (spec.cache_salt, spec.priority) == ("mine", 3)
    assert bytes(spec.prompt).endswith(b"Ada: ")


@pytest.mark.parametrize("field", ["tools", "tool_choice", "enable_thinking", "thinking_token_budget", "documents"])
def test_chat_only_field_is_rejected_for_completions(server: LiveServer, field: str) -> None:
    value = {"tools": [{}], "tool_choice": "required", "enable_thinking": True, "documents": [{}]}.get(field, 7)
    answer = server.post(TEXT, {"prompt": "a", field: value})
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"stop": "", "suffix": "", "prompt_logprobs": 0, "structured_outputs": {}, "bad_words": []}),
        (TEXT, {"max_tokens": 5.0, "n": 1.0, "logit_bias": {"65": 1.0}, "seed": 3.0, "tools": [], "mirostat": 0}),
        (TEXT, {"allowed_token_ids": [], "bad_words_token_ids": [], "kv_transfer_params": {}, "lora_path": ""}),
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": None}, *HI], "documents": [], "chat_template": ""}),
        (TEXT, {"prompt_token_ids": [], "repetition_detection": {}, "reasoning": {}, "separate_reasoning": True}),
        (CHAT, {"messages": HI, "prompt_token_ids": [], "watermarking": False, "stream_interval": 3}),
        (CHAT, {"messages": [*HI, {"role": "assistant"}, *HI], "top_k": -1.0, "disable_chat_template": False}),
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": [], "audio": None, "annotations": []}, *HI]}),
    ],
)
def test_neutral_values_are_accepted(server: LiveServer, path: str, fields: dict[str, Any]) -> None:
    answer = server.post(path, {"prompt": "a", **fields} if path == TEXT else fields)
    assert answer.status == 200, answer.body
    assert "x-ignored-fields" not in answer.headers
    params = server.client.specs[-1].params
    if "seed" in fields:
        assert (params.seed, params.max_tokens, params.logit_bias) == (3, 5, {65: 1.0})


def test_ignored_nested_fields_are_named(server: LiveServer) -> None:
    body = {
        "messages": [{**HI[0], "mood": "good"}, {"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}],
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False, "colour": "red", "none": None},
        "extra": 1,
    }
    answer = server.post(CHAT, body)
    assert answer.status == 200
    names = "extra, messages[].content[].y, messages[].mood, stream_options.colour"
    assert answer.headers["x-ignored-fields"] == names


def test_operator_limits_choices_and_logprobs() -> None:
    with live(max_n=2, max_logprobs=3) as server:
        for body, param in (
            ({"prompt": "a", "n": 3}, "n"),
            ({"prompt": ["a", "b", "c"]}, "prompt"),
            ({"prompt": "a", "logprobs": 4}, "logprobs"),
            ({"prompt": "a", "prompt_logprobs": 4}, "prompt_logprobs"),
        ):
            answer = server.post("/v1/completions", body)
            assert (answer.status, answer.error["param"]) == (400, param)
        assert server.post("/v1/completions", {"prompt": "a", "n": 2, "logprobs": 3}).status == 200


def test_logprobs_of_all_choices_are_limited_together() -> None:
    with live(lambda: FakeClient(max_model_len=4000, max_num_seqs=128)) as server:
        answer = server.post("/v1/completions", {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 400})
        assert (answer.status, answer.error["param"]) == (400, "logprobs")
        assert "1075200" in answer.error["message"]
