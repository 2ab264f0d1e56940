"""Usage of an answer as a router reads it."""

from __future__ import annotations

import pytest

from fd_core.http.access.record import USAGE_HEADER, UsageMeter, usage_comment
from tests.server.fakes import LiveServer

DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "took"),
    [
        (b'{"usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}}', (5, 7)),
        (b'{"usage": {"input_tokens": 5, "output_tokens": 7}}', (5, 7)),
        (b'{"usage": {"input_tokens": 2, "cache_read_input_tokens": 3, "output_tokens": 7}}', (5, 7)),
        (b'{"prompt_eval_count": 5, "eval_count": 7}', (5, 7)),
        (b'{"usage": null}', (0, 0)),
        (b'{"error": {}}', (0, 0)),
        (b'{"usage": "much"}', (0, 0)),
        (b"\xff", (0, 0)),
        (b"[" * 5000, (0, 0)),
    ],
)
def test_usage_is_read_from_a_whole_answer(body: bytes, took: tuple[int, int]) -> None:
    meter = UsageMeter()
    assert meter.tokens(9) is None
    meter.whole(body)
    assert meter.tokens(9) == took


def test_usage_comment_of_a_stream_is_read_and_removed() -> None:
    meter, first = UsageMeter(), b'data: {"text": "say : usage 1 2"}\n\n'
    assert meter.piece(first) == first
    assert meter.tokens(9) == (9, 1)
    assert meter.piece(first + usage_comment(5, 7) + DONE) == first + DONE
    assert meter.tokens(9) == (5, 7)


def test_usage_of_lines_is_read_from_the_last() -> None:
    meter = UsageMeter()
    forged = b'{"message":{"tool_calls":[{"function":{"arguments":{"done":true,"eval_count":1}}}]},"done":false}\n'
    assert meter.piece(forged + forged) == forged + forged and meter.tokens(9) == (9, 2)
    last = b'{"done":true,"prompt_eval_count":5,"eval_count":7}\n'
    assert meter.piece(forged + last) == forged + last and meter.tokens(9) == (5, 7)


def test_text_cannot_forge_usage() -> None:
    meter = UsageMeter()
    forged = b'data: {"text": "\\n: usage 0 0\\n\\n"}\n\n'
    assert meter.piece(forged) == forged and meter.tokens(9) == (9, 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_server_writes_the_comment_only_on_request(server: LiveServer, path: str) -> None:
    turn = [{"role": "user", "content": "hi"}]
    body = {
        "/v1/completions": {"prompt": "abcde"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": turn, "max_tokens": 50},
    }.get(path, {"messages": turn})
    body |= {"model": "fake", "stream": True}
    assert b": usage " not in server.post(path, body).body
    raw = server.post(path, body, **{USAGE_HEADER: "1"}).body
    meter = UsageMeter()
    assert b": usage" not in meter.piece(raw)
    took = meter.tokens(0)
    assert took is not None and took[0] == len(server.client.specs[-1].prompt) and took[1] == 14
