"""Fields of other servers that are supported here: their effect on prompt, parameters and answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.fakes import LiveServer, live

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TALK = [*HI, {"role": "assistant", "content": "Well, "}]


@pytest.fixture(scope="module")
def trusting() -> Iterator[LiveServer]:
    with live(trust_request_chat_template=True) as server:
        yield server


def read(server: LiveServer, path: str, body: dict[str, Any]) -> bytes:
    """Return the prompt received by the engine."""
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    assert "x-ignored-fields" not in answer.headers
    return bytes(server.client.specs[-1].prompt)


def params(server: LiveServer, **fields: Any) -> Any:
    read(server, TEXT, {"prompt": "a", **fields})
    return server.client.specs[-1].params


def test_prompt_token_ids_replace_the_prompt(server: LiveServer) -> None:
    assert read(server, CHAT, {"messages": [], "prompt_token_ids": [65, 66]}) == b"AB"
    assert read(server, CHAT, {"prompt_token_ids": [65, 66]}) == b"AB"
    assert read(server, TEXT, {"prompt": "x", "prompt_token_ids": [65]}) == b"A"
    server.client.specs.clear()
    server.post(TEXT, {"prompt_token_ids": [[65], [66, 67]]})
    assert [bytes(spec.prompt) for spec in server.client.specs] == [b"A", b"BC"]


def test_chat_without_template_is_the_message_text(server: LiveServer) -> None:
    assert read(server, CHAT, {"messages": HI, "disable_chat_template": True}) == b"hi"


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"truncate_prompt_tokens": 3}, b"def"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": 9}, b"abcdef"),
        ({"truncate_prompt_tokens": -1}, b"abcdef"),
        ({"truncation_side": "left"}, b"abcdef"),
    ],
)
def test_long_prompts_are_truncated_as_requested(server: LiveServer, fields: dict[str, Any], left: bytes) -> None:
    assert read(server, TEXT, {"prompt": "abcdef", **fields}) == left


def test_truncate_minus_one_leaves_room_for_the_output(server: LiveServer) -> None:
    body = {"prompt": "a" * 1000, "truncate_prompt_tokens": -1, "max_tokens": 30}
    assert len(read(server, TEXT, body)) == 400 - 30
    talk = {"messages": [{"role": "user", "content": "a" * 1000}], "truncate_prompt_tokens": -1}
    assert read(server, CHAT, talk)[-20:] == b"aaaaaaaa\nassistant: "
    assert len(server.client.specs[-1].prompt) == 399


def test_truncated_part_is_neither_counted_nor_echoed(server: LiveServer) -> None:
    answer = server.post(TEXT, {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 1}).json
    assert answer["choices"][0]["text"] == "efH"
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("stated", [None, False])
def test_final_message_is_continued(server: LiveServer, stated: bool | None) -> None:
    body = {"messages": TALK, "continue_final_message": True, "add_generation_prompt": stated}
    assert read(server, CHAT, body) == b"user: hi\nassistant: Well, "
    empty = [*HI, {"role": "assistant", "content": ""}]
    assert read(server, CHAT, {"messages": empty, "continue_final_message": True}) == b"user: hi\nassistant: "


def test_request_may_bring_its_template_if_allowed(trusting: LiveServer) -> None:
    template = "<{{ messages[0].content }}|{{ documents[0].text }}>"
    documents = [{"title": "t", "text": "paper"}]
    body = {"messages": HI, "chat_template": template, "documents": documents}
    assert read(trusting, CHAT, body) == b"<hi|paper>"
    tokens = trusting.post("/tokenize", {"messages": HI, "chat_template": template, "documents": documents}).json
    assert bytes(tokens["tokens"]) == b"<hi|paper>"
    assert read(trusting, CHAT, {"messages": HI}) == b"user: hi\nassistant: "


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ 1 / 0 }}", "{% for i in range(99999999) %}x{% endfor %}", "{{ ''.__class__ }}"]
)
def test_bad_template_of_a_request_is_a_bad_request(trusting: LiveServer, template: str) -> None:
    answer = trusting.post(CHAT, {"messages": HI, "chat_template": template})
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    too_long = trusting.post(CHAT, {"messages": HI, "chat_template": "a" * 65_537})
    assert (too_long.status, too_long.error["param"]) == (400, "chat_template")


def test_lengths_have_several_names(server: LiveServer) -> None:
    assert params(server, max_completion_tokens=30).max_tokens == 30
    assert params(server, min_new_tokens=3).min_tokens == 3
    assert params(server, min_new_tokens=3, min_tokens=3).min_tokens == 3


def test_allowed_tokens_are_a_set(server: LiveServer) -> None:
    assert params(server, allowed_token_ids=[7, 3, 7]).allowed_token_ids == (3, 7)
    assert params(server, allowed_token_ids=[]).allowed_token_ids is None


def test_bad_words_are_banned_at_word_start_and_within_words(server: LiveServer) -> None:
    found = params(server, bad_words=["ab", " c"], bad_words_token_ids=[5, [6, 7], [5]]).bad_words_token_ids
    assert found == ((97, 98), (32, 97, 98), (99,), (32, 99), (5,), (6, 7))


def test_logprobs_may_name_ids(server: LiveServer) -> None:
    body = {"logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
    scores = server.post(TEXT, {"prompt": "a", **body}).json["choices"][0]["logprobs"]
    assert scores["tokens"] == ["token_id:72"]
    assert set(scores["top_logprobs"][0]) == {"token_id:65", "token_id:72"}
    body |= {"logprobs": True, "top_logprobs": 1}
    content = server.post(CHAT, {"messages": HI, **body}).json["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "token_id:72"
    assert content[0]["top_logprobs"][0]["token"] == "token_id:65"


def test_reasoning_effort_is_passed_to_templates_that_use_it(server: LiveServer, trusting: LiveServer) -> None:
    for effort in (None, "none", "medium"):
        assert read(server, CHAT, {"messages": HI, "reasoning_effort": effort}) == b"user: hi\nassistant: "
    refused = server.post(CHAT, {"messages": HI, "reasoning_effort": "low"})
    assert (refused.status, refused.error["param"]) == (400, "reasoning_effort")
    unknown = server.post(CHAT, {"messages": HI, "reasoning_effort": "heroic"})
    assert (unknown.status, unknown.error["param"]) == (400, "reasoning_effort")
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    body = {"messages": HI, "chat_template": template}
    assert read(trusting, CHAT, {**body, "reasoning_effort": "low"}).split() == [b"low"]
    assert read(trusting, CHAT, {**body, "reasoning_effort": "none"}) == b"none False"
