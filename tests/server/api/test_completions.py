"""POST /v1/completions."""

from __future__ import annotations

import pytest

from fd_core.types import choice_seed
from tests.server.fakes import LiveServer

PATH = "/v1/completions"


def texts(answer_json: dict) -> list[str]:
    return [choice["text"] for choice in answer_json["choices"]]


def test_answer_has_openai_format(server: LiveServer) -> None:
    body = server.post(PATH, {"prompt": "abc"}, X_Request_Id="r").json
    assert (body["id"], body["object"], body["model"]) == ("cmpl-r", "text_completion", "fake")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello, world!",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "weight_version": "0",
        }
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert server.client.specs[0].params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
        ([0], ["\0"]),
    ],
)
def test_prompt_may_be_texts_or_ids(server: LiveServer, prompt: object, read: list[str]) -> None:
    answer = server.post(PATH, {"prompt": prompt, "max_tokens": 2})
    assert [bytes(spec.prompt).decode() for spec in server.client.specs] == read
    assert texts(answer.json) == ["He"] * len(read)
    assert answer.json["usage"]["prompt_tokens"] == sum(map(len, read))


def test_choices_are_ordered_by_prompt_then_number(server: LiveServer) -> None:
    server.client.reply = lambda spec: bytes(spec.prompt) + str(spec.params.seed % 1000).encode()
    body = {"prompt": ["a", "b"], "n": 2, "seed": 3}
    answer = server.post(PATH, body)
    second = choice_seed(3, 1) % 1000
    assert texts(answer.json) == ["a3", f"a{second}", "b3", f"b{second}"]
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]


def test_echo_puts_the_prompt_first(server: LiveServer) -> None:
    body = {"prompt": ["ab", "c"], "echo": True, "max_tokens": 2}
    assert texts(server.post(PATH, body).json) == ["abHe", "cHe"]
    assert texts(server.post(PATH, {**body, "prompt": [97, 98]}).json) == ["abHe"]
    events = server.post(PATH, {**body, "prompt": "ab", "stream": True}).events[:-1]
    assert [event["choices"][0]["text"] for event in events] == ["ab", "H", "e"]


def test_logprobs_have_offsets_into_the_text(server: LiveServer) -> None:
    server.client.reply = lambda _: "aéb".encode()
    answer = server.post(PATH, {"prompt": "x", "logprobs": 2, "max_tokens": 4})
    choice = answer.json["choices"][0]
    scores = choice["logprobs"]
    assert choice["text"] == "aéb"
    assert scores["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert scores["text_offset"] == [0, 1, 1, 2]
    assert scores["token_logprobs"] == [-0.5] * 4
    assert scores["top_logprobs"][0] == {"A": -9999.0, "B": -9999.0, "a": -0.5}
    streamed = server.post(PATH, {"prompt": "x", "logprobs": 2, "max_tokens": 4, "stream": True}).events[:-1]
    assert [o for event in streamed for o in event["choices"][0]["logprobs"]["text_offset"]] == [0, 1, 1, 2]


def test_logprobs_end_at_the_stop_string(server: LiveServer) -> None:
    server.client.per_step = 20
    choice = server.post(PATH, {"prompt": "x", "logprobs": 0, "stop": "ll"}).json["choices"][0]
    assert choice["logprobs"]["tokens"] == ["H", "e", "l", "l"]
    assert choice["logprobs"]["top_logprobs"][0] == {"H": -0.5}


def test_control_tokens_are_included_on_request(server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
    assert texts(server.post(PATH, {**body, "skip_special_tokens": False}).json) == ["Hello, world!<|end|>"]
    assert texts(server.post(PATH, body).json) == ["Hello, world!"]


def test_long_prompt_is_tokenized_off_the_loop_to_equal_ids(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"prompt": "ab" * 10_000})
    assert answer.json["count"] == 20_000


def test_best_of_equal_to_n_has_no_effect(server: LiveServer) -> None:
    assert len(server.post(PATH, {"prompt": "x", "n": 2, "best_of": 2}).json["choices"]) == 2
