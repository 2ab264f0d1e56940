"""Each API has its own documented limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from tests.server.fakes import FakeClient, LiveServer, live

HI = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LONGEST = {CHAT: 64, RESPONSES: 128, MESSAGES: 128}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    MESSAGES: {"model": "fake", "messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(lambda: FakeClient(max_model_len=9000), parsers=Parsers(HermesTools)) as each:
        yield each


def offered(path: str, name: str) -> dict[str, Any]:
    if path == CHAT:
        return {"type": "function", "function": {"name": name}}
    return {"name": name, "input_schema": {}} if path == MESSAGES else {"type": "function", "name": name}


@pytest.mark.parametrize("path", LONGEST)
def test_tool_name_length_is_the_limit_of_the_api(server: LiveServer, path: str) -> None:
    for length, status in ((LONGEST[path], 200), (LONGEST[path] + 1, 400)):
        answer = server.post(path, BODIES[path] | {"tools": [offered(path, "a" * length)]})
        assert answer.status == status, answer.body
    assert str(LONGEST[path]) in answer.body.decode()


@pytest.mark.parametrize("path", BODIES)
def test_top_p_of_zero_keeps_the_most_likely_token(server: LiveServer, path: str) -> None:
    for value, status in ((0, 200), (0.0, 200), (5e-324, 200), (1, 200), (-0.01, 400), (1.01, 400)):
        assert server.post(path, BODIES[path] | {"top_p": value}).status == status, value


@pytest.mark.parametrize(
    "value", ["1e-300", "5e-324", "0", "-0.0", "1e308", "1e309", "-1e309", "9" * 5000, "NaN", "10.1"]
)
def test_penalty_out_of_range_is_a_400(server: LiveServer, value: str) -> None:
    body = '{"prompt": "a", "max_tokens": 2, "repetition_penalty": %s}' % value  # noqa: UP031
    assert server.post("/v1/completions", body.encode()).status == 400


def test_assistant_refusals_are_rendered(server: LiveServer) -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    assert server.post(CHAT, BODIES[CHAT] | {"messages": [*HI, refused, *HI]}).status == 200
    assert b"I cannot." in bytes(server.client.specs[-1].prompt)
    assert server.post(RESPONSES, BODIES[RESPONSES] | {"input": [*HI, refused, *HI]}).status == 200
    assert b"I cannot." in bytes(server.client.specs[-1].prompt)
