"""Token id 0 between a client and the engine, and the salt of a request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.fakes import FakeClient, LiveServer, live

PATH = "/v1/completions"
REPLY = b"ab\0cd"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    async def client() -> FakeClient:
        return FakeClient(REPLY)

    with live(client) as started:
        yield started


def choice(server: LiveServer, **body: object) -> dict:
    answer = server.post(PATH, {"prompt": "x", "max_tokens": 10, **body})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def spec(server: LiveServer):
    return server.client.specs[-1]


def test_zero_is_part_of_a_text(server: LiveServer) -> None:
    assert choice(server)["text"] == "ab\0cd"


def test_zero_as_a_stop_token_is_named_and_not_shown(server: LiveServer) -> None:
    found = choice(server, stop_token_ids=[0])
    assert (found["text"], found["finish_reason"]) == ("ab", "stop")
    assert found["stop_reason"] == 0 and found["stop_reason"] is not None
    assert spec(server).params.stop_token_ids == (0,)


def test_zero_as_a_stop_token_may_be_shown(server: LiveServer) -> None:
    assert choice(server, stop_token_ids=[0], include_stop_str_in_output=True)["text"] == "ab\0"


def test_zero_as_a_stop_token_ends_a_stream(server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 10, "stop_token_ids": [0], "stream": True}
    events = server.post(PATH, body).events
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "ab"
    assert events[-2]["choices"][0]["stop_reason"] == 0
    assert events[-1] == "[DONE]"


def test_zero_as_a_bias_reaches_the_engine(server: LiveServer) -> None:
    choice(server, logit_bias={"0": -100})
    assert spec(server).params.logit_bias == {0: -100.0}


def test_zero_in_a_prompt_reaches_the_engine(server: LiveServer) -> None:
    choice(server, prompt=[0, 5, 0])
    assert spec(server).prompt == (0, 5, 0)


def test_zero_has_a_logprob(server: LiveServer) -> None:
    found = choice(server, logprobs=1)["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == 5 + 1
    assert found["tokens"][2] == "\0"


def test_zero_as_eos_ends_a_text_and_is_not_shown() -> None:
    async def client() -> FakeClient:
        return FakeClient(REPLY, eos_token_ids=(0,))

    with live(client) as server:
        found = choice(server)
        assert (found["text"], found["finish_reason"], found["stop_reason"]) == ("ab", "stop", None)


@pytest.mark.parametrize("salt", ["tenant-1", "t", " t", "x" * 256])
def test_salt_reaches_the_engine_unchanged(server: LiveServer, salt: str) -> None:
    choice(server, cache_salt=salt)
    assert spec(server).cache_salt == salt
