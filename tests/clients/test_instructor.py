"""The client `instructor`: pydantic models by tools, by JSON and by JSON schema."""

from __future__ import annotations

import instructor
import openai
import pytest
from pydantic import BaseModel

from tests.server.fakes import LiveServer

MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_model_is_filled(scripted: LiveServer, mode: instructor.Mode) -> None:
    plain = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0)
    client = instructor.from_openai(plain, mode=mode)
    messages = [{"role": "user", "content": "Who?"}]
    person = client.chat.completions.create(model="scripted", response_model=Person, messages=messages, max_retries=0)
    assert person.model_dump() == {"name": "Ada", "age": 36}


def test_real_model_fills_a_model(smollm2: str) -> None:
    plain = openai.OpenAI(base_url=f"{smollm2}/v1", api_key="any", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    person = client.chat.completions.create(
        model="smollm2",
        response_model=Person,
        messages=[{"role": "user", "content": "Ada is 36 years old."}],
        temperature=0,
        max_tokens=300,
        max_retries=0,
    )
    assert isinstance(person, Person)
