"""The client `ollama` at a server and at a router: chats, completions, tools, thinking, embeddings, streams."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import pytest

from tests.router.gateway.fakes import gateway
from tests.server.fakes import LiveServer, key_file

MESSAGES = [{"role": "user", "content": "hi"}]


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module", params=["server", "router"])
def client(
    request: pytest.FixtureRequest, scripted: LiveServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ollama.Client]:
    if request.param == "server":
        yield ollama.Client(host=scripted.url)
        return
    file = key_file(tmp_path_factory.mktemp("keys"), {"name": "alice"})
    with gateway([scripted], file) as url:
        yield ollama.Client(host=url, headers={"X-Api-Key": "alice"})


def test_tool_is_called_and_its_result_used(client: ollama.Client) -> None:
    first = client.chat("scripted", MESSAGES, tools=[weather])
    [call] = first.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Röm"})
    assert (first.message.thinking or "").strip() == "Hm."
    result = {"role": "tool", "tool_name": "weather", "content": weather("Röm")}
    second = client.chat("scripted", [*MESSAGES, first.message, result], tools=[weather])
    assert second.message.content == "It is sunny in Röm."


def test_streams_are_pieces_of_the_answer(client: ollama.Client) -> None:
    pieces = list(client.chat("scripted", MESSAGES, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == "Hello!"
    assert pieces[-1].done and pieces[-1].done_reason == "stop"
    assert "".join(piece.response for piece in client.generate("scripted", "hi", stream=True)) == "Hello!"


def test_schema_is_enforced(client: ollama.Client) -> None:
    assert client.chat("scripted", MESSAGES, format={"type": "object"}).message.content == '{"name": "Ada", "age": 36}'


def test_model_is_described_and_embeds(client: ollama.Client) -> None:
    assert "scripted" in {each.model for each in client.list().models}
    assert "scripted" in {each.model for each in client.ps().models}
    assert "tools" in (client.show("scripted").capabilities or [])
    assert len(client.embed("scripted", ["a", "b"]).embeddings) == 2


def test_error_has_status_and_text(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="the model 'absent' does not exist") as caught:
        client.chat("absent", MESSAGES)
    assert caught.value.status_code == 404
