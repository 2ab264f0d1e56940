"""The client `openai-agents`, over the Responses API (its default) and over chats."""

from __future__ import annotations

import asyncio

import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.server.fakes import LiveServer

set_tracing_disabled(True)
cities: list[str] = []


class Person(BaseModel):
    name: str
    age: int


@function_tool
def weather(city: str) -> str:
    """Return the weather."""
    cities.append(city)
    return "sunny"


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def model(scripted: LiveServer, request: pytest.FixtureRequest) -> object:
    client = AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0)
    return request.param(model="scripted", openai_client=client)


def test_agent_calls_its_tool_and_answers(model: object) -> None:
    cities.clear()
    agent = Agent(name="a", instructions="Be brief.", model=model, tools=[weather])
    assert asyncio.run(Runner.run(agent, "Weather?")).final_output == "It is sunny in Röm."
    assert cities == ["Röm"]


def test_agent_streams(model: object) -> None:
    async def run() -> str:
        agent = Agent(name="a", instructions="Be brief.", model=model, tools=[weather])
        result = Runner.run_streamed(agent, "Weather?")
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(run()) == "It is sunny in Röm."


def test_agent_fills_a_schema(model: object) -> None:
    agent = Agent(name="a", instructions="Be brief.", model=model, output_type=Person)
    assert asyncio.run(Runner.run(agent, "Who?")).final_output == Person(name="Ada", age=36)
