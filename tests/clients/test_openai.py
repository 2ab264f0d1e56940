"""The client `openai`, with strict response validation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.fakes import LiveServer

MESSAGES = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
FLAT = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}


class Person(BaseModel):
    name: str
    age: int


class Mood(BaseModel):
    mood: Literal["good", "bad"]
    reasons: list[str]


@pytest.fixture
def client(scripted: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{scripted.url}/v1", api_key="any", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture
def real(smollm2: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{smollm2}/v1", api_key="any", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_tool_is_called_and_its_result_used(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="scripted", messages=MESSAGES, tools=[TOOL])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    [call] = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Röm"}
    turns = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = client.chat.completions.create(model="scripted", messages=turns, tools=[TOOL])
    assert second.choices[0].message.content == "It is sunny in Röm."
    assert second.choices[0].message.model_extra["reasoning_content"] == "Hm."


def test_stream_helper_collects_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=MESSAGES, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == {"city": "Röm"}


def test_answers_are_parsed_with_pydantic(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="scripted", input="hi", text_format=Person)
    assert answer.output_parsed == Person(name="Ada", age=36)


def test_responses_call_tools_and_continue(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="hi", tools=[FLAT])
    [call] = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(model="scripted", input=[output], previous_response_id=first.id, tools=[FLAT])
    assert second.output_text == "It is sunny in Röm."
    assert client.responses.retrieve(first.id).id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_response_stream_helper_collects_items(client: openai.OpenAI) -> None:
    with client.responses.stream(model="scripted", input="hi", tools=[FLAT]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "function_call"]
    with client.responses.stream(model="scripted", input="hi", text_format=Person) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)


def test_errors_have_their_classes_and_fields(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input="hi", background=True)
    assert caught.value.param == "background"


def test_real_model_calls_a_required_tool(real: openai.OpenAI) -> None:
    for seed in range(3):
        answer = real.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            temperature=1,
            seed=seed,
            max_tokens=200,
        )
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        if answer.choices[0].finish_reason == "tool_calls":
            assert set(json.loads(call.function.arguments)) == {"city"}


def test_real_model_fills_a_schema(real: openai.OpenAI) -> None:
    for seed in range(3):
        answer = real.responses.parse(
            model="smollm2", input="How are you?", text_format=Mood, temperature=1, max_output_tokens=400
        )
        if answer.status == "completed":
            assert answer.output_parsed.mood in ("good", "bad"), seed
