"""The client `pydantic-ai`, over chats, responses and messages."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.server.fakes import LiveServer


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=["chat", "responses", "messages"])
def model(scripted: LiveServer, request: pytest.FixtureRequest) -> Any:
    if request.param == "messages":
        return AnthropicModel("scripted", provider=AnthropicProvider(base_url=scripted.url, api_key="any"))
    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind("scripted", provider=OpenAIProvider(base_url=f"{scripted.url}/v1", api_key="any"))


def test_agent_calls_its_tool_and_answers(model: Any) -> None:
    agent = Agent(model, instructions="Be brief.")
    cities = []

    @agent.tool_plain
    def weather(city: str) -> str:
        """Return the weather."""
        cities.append(city)
        return "sunny"

    assert agent.run_sync("Weather?").output == "It is sunny in Röm."
    assert cities == ["Röm"]


def test_agent_fills_a_schema(model: Any) -> None:
    assert Agent(model, output_type=Person).run_sync("Who?").output == Person(name="Ada", age=36)


def test_agent_streams(model: Any) -> None:
    result = Agent(model).run_stream_sync("Hi")
    assert "".join(result.stream_text(delta=True)) == "Hello!"
