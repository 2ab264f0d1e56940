"""The client `langchain-openai`: bound tools and structured output, over chats and responses."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.server.fakes import LiveServer


class Person(BaseModel):
    """Someone."""

    name: str
    age: int


@tool
def weather(city: str) -> str:
    """Return the weather."""
    return f"sunny in {city}"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(scripted: LiveServer, request: pytest.FixtureRequest) -> ChatOpenAI:
    return ChatOpenAI(
        model="scripted",
        base_url=f"{scripted.url}/v1",
        api_key="any",
        max_retries=0,
        use_responses_api=request.param,
    )


def test_bound_tools_are_called_and_answered(model: ChatOpenAI) -> None:
    bound = model.bind_tools([weather])
    first = bound.invoke("Weather?")
    [call] = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Röm"})
    answered = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert bound.invoke([HumanMessage("Weather?"), first, answered]).text == "It is sunny in Röm."


def test_joined_stream_is_a_call(model: ChatOpenAI) -> None:
    whole: Any = None
    for chunk in model.bind_tools([weather]).stream("Weather?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == {"city": "Röm"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: ChatOpenAI, method: str) -> None:
    assert model.with_structured_output(Person, method=method).invoke("Who?") == Person(name="Ada", age=36)
