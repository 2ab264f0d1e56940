"""The client `anthropic`: messages, tools, thinking, counting, streams."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.documents.blocks import ROOT, blocks_of
from tests.server.fakes import LiveServer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture
def client(scripted: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=scripted.url, api_key="any", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_tool_is_called_and_its_result_used(client: anthropic.Anthropic) -> None:
    first = client.messages.create(
        model="scripted", max_tokens=500, messages=MESSAGES, tools=[TOOL], system="Be brief."
    )
    assert (first.stop_reason, [block.type for block in first.content]) == ("tool_use", ["thinking", "tool_use"])
    call = first.content[1]
    assert call.input == {"city": "Röm"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(model="scripted", max_tokens=500, messages=turns, tools=[TOOL])
    assert second.content[-1].text == "It is sunny in Röm."
    assert second.stop_reason == "end_turn"


def test_thinking_is_accepted_and_returned(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="scripted", max_tokens=2000, messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "Hm."


def test_stream_helper_collects_the_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="scripted", max_tokens=500, messages=MESSAGES, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "thinking" in kinds and "input_json" in kinds
    assert final.content[-1].input == {"city": "Röm"}
    with client.messages.stream(model="scripted", max_tokens=500, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == "Hello!"


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="scripted", messages=MESSAGES, tools=[TOOL], system="Hi.")
    answer = client.messages.create(model="scripted", max_tokens=9, messages=MESSAGES, tools=[TOOL], system="Hi.")
    assert count.input_tokens == answer.usage.input_tokens


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="scripted", max_tokens=99, messages=MESSAGES, stop_sequences=["lo"])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[-1].text) == ("stop_sequence", "lo", "Hel")


def test_errors_have_their_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(
            model="scripted", max_tokens=9, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "tool", "name": "x"}
        )
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=9, messages=MESSAGES)


def test_real_model_answers(smollm2: str) -> None:
    with anthropic.Anthropic(base_url=smollm2, api_key="any", max_retries=0) as client:
        answer = client.messages.create(
            model="smollm2",
            max_tokens=9,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": "What is gravity?"}],
        )
    # Each of these tokens leads the runner-up by more than 1 in log-probability, in float32 and in bfloat16.
    assert answer.content[0].text == "Gravity is a fundamental concept in physics that"


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    listed = client.models.list()
    assert (listed.data[0].id, listed.last_id, listed.has_more) == ("scripted", listed.data[-1].id, False)
    assert client.models.retrieve("scripted").display_name == "scripted"


def test_script_of_the_docs_prints_an_answer(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [each for each in blocks_of(ROOT / "docs" / "serve" / "apis.md") if "anthropic" in each.text]
    assert "http://127.0.0.1:8000" in block.text
    exec(block.text.replace("http://127.0.0.1:8000", smollm2), {})
    assert capsys.readouterr().out.strip()  # the script uses the default temperature, so the text is sampled
