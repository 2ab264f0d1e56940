"""The official client works unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.server.fakes import LiveServer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "fd_core"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, n=2, logprobs=True, top_logprobs=1, max_completion_tokens=5, seed=1
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    content = answer.choices[0].logprobs.content
    assert bytes(b for entry in content for b in entry.bytes) == b"Hello"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].finish_reason == "length"


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world!"
    assert last.usage.completion_tokens == 14


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "b"], logprobs=1, extra_body={"top_k": 3})
    assert [choice.text for choice in answer.choices] == ["Hello, world!"] * 2
    assert answer.choices[0].logprobs.text_offset[:3] == [0, 1, 2]
    stream = client.completions.create(model="fake", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world!"


def test_errors_have_their_classes(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"
    server.client.fail_after = 3
    with pytest.raises(openai.APIError, match="a row failed"):
        list(client.chat.completions.create(model="fake", messages=MESSAGES, stream=True))


def test_async_client_with_many_concurrent_streams(server: LiveServer) -> None:
    server.client.reply = lambda spec: bytes(spec.prompt) * 3

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        if number % 2:
            return (await client.completions.create(model="fake", prompt=f"<{number}>")).choices[0].text
        stream = await client.completions.create(model="fake", prompt=f"<{number}>", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(24)))

    assert asyncio.run(all_of_them()) == [f"<{number}>" * 3 for number in range(24)]
