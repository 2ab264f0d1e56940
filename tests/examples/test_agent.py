"""The agents call tools in parallel, read errors, and stop after a limit; with both clients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import pytest

from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.types import RequestSpec
from tests.server.fakes import FakeClient, LiveServer, live

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
CLIENTS = {"openai": ("OpenAI", "/v1"), "anthropic": ("Anthropic", "")}
Agent = Callable[..., str]
Script = Callable[[str], ModuleType]


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def reply(spec: RequestSpec) -> bytes:
    """Call two tools at once; retry the failed call; answer with the last result."""
    prompt = bytes(spec.prompt).decode()
    answers = prompt.count("<tool_response>")
    if "for ever" in prompt:
        text = called("calculate", '{"expression": "1 + 1"}')
    elif answers == 0:
        text = called("calculate", '{"expression": "6 * (7 / 0)"}') + called("time_now", '{"hours_east": 2}')
    elif answers == 2:
        assert "ZeroDivisionError" in prompt and "Friday, 01 May 2026, 14:00" in prompt, prompt
        text = called("calculate", '{"expression": "6 * 7 - -0.5"}')
    else:
        text = "It is 42.5." if "42.5" in prompt else prompt
    return text.encode()


def scripted() -> FakeClient:
    client = FakeClient(max_model_len=60_000)
    client.reply = reply
    client.per_step = 16
    return client


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(scripted, parsers=Parsers(HermesTools), served_model_names=("scripted",)) as made:
        yield made


@pytest.fixture(params=CLIENTS)
def agent(request: pytest.FixtureRequest, server: LiveServer, script: Script) -> Iterator[Agent]:
    """Yield `run` of one of the programs; it takes the question, and options."""
    package = pytest.importorskip(request.param)
    program = script(f"agent/with_{request.param}")
    tools = script("agent/agent_tools").make_tools(lambda: NOON)
    name, path = CLIENTS[request.param]
    with getattr(package, name)(base_url=f"{server.url}{path}", api_key="any", max_retries=0) as client:
        yield lambda question, **options: program.run(client, "scripted", question, tools, **options)


def test_both_tools_are_called_in_one_turn_and_errors_are_returned(agent: Agent) -> None:
    assert agent("What are six times seven and a half, and what time is it in Athens?") == "It is 42.5."


def test_turns_end(agent: Agent) -> None:
    with pytest.raises(RuntimeError, match="no answer after 3 turns"):
        agent("Compute for ever.", turns=3)


@pytest.mark.parametrize("name", CLIENTS)
def test_program_answers_the_question_of_its_command_line(
    name: str, server: LiveServer, script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(name)
    program = script(f"agent/with_{name}")
    monkeypatch.setattr(program, "make_tools", lambda _: script("agent/agent_tools").make_tools(lambda: NOON))
    monkeypatch.setattr(sys, "argv", ["agent", "What is six times seven?", "--url", server.url])
    program.main()
    assert capsys.readouterr().out == "It is 42.5.\n"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"expression": "2 + 3 * (4 - 1)"}, ("11", False)),
        ({"expression": "-1 / 4"}, ("-0.25", False)),
        (
            {"expression": "__import__('os')"},
            ("ValueError: not a number, + - * / or a bracket: __import__('os')", True),
        ),
        ({"expression": "9 ** 9"}, ("ValueError: not a number, + - * / or a bracket: 9 ** 9", True)),
        ({"expression": "True"}, ("ValueError: not a number, + - * / or a bracket: True", True)),
        (["1"], None),
        ({}, None),
    ],
)
def test_calculator_evaluates_numbers_only(script: Script, arguments: Any, wanted: tuple[str, bool] | None) -> None:
    module = script("agent/agent_tools")
    output, failed = module.call(module.make_tools(lambda: NOON), "calculate", arguments)
    assert (output, failed) == wanted if wanted else failed
    assert module.call({}, "none", {}) == ("KeyError: 'none'", True)
