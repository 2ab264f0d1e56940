"""Outputs recorded by others: the fixtures of the package canitoolcall."""

from __future__ import annotations

import json
from typing import Any

import pytest
from recorded import REASONING_PARSERS, TOOL_PARSERS, answer_of, parsed

from fd_core.text.parsing.answer import AnswerParser
from fd_core.text.parsing.events import Event

fixtures = pytest.importorskip("canitoolcall.fixtures")

FORMATS = {
    "qwen3-hermes": ("qwen3", "hermes"),
    "llama": (None, "llama3_json"),
    "mistral": ("mistral", "mistral"),
    "glm": ("qwen3", "glm45"),
    "deepseek": ("deepseek_r1", "deepseek"),
    "gpt-oss": ("gpt_oss", "gpt_oss"),
    "kimi": ("qwen3", "kimi_k2"),
}
OTHER_FORMATS = (
    "deepseek/v32",
    "deepseek/v4",
    "sglang-v32",
    "sglang-v4",
    "vllm-v32",
    "vllm-v4",
    "<｜DSML｜",
    "kimi/k3",
)
DIFFERENT = {
    "glm/glm47-missing-last-close-arg-value": "a value may hold </tool_call>, so only </arg_value> ends it",
    "qwen3-hermes/vllm-invalid-json-missing-brace": "the arguments are whole, only the brace around them is not",
    "llama/l4-truncated-missing-close-bracket": "the first call is whole and was streamed; only the second is cut",
    "gpt-oss/llamacpp-builtin-python-recipient": "what goes to a tool that is not there is kept, as reasoning",
    "kimi/k2i-vllm-content-after-tool-section": "white space before calls belongs to them",
    "kimi/k2i-vllm-noise-between-markers": "text between the markers of a section is content",
    "gpt-oss/harmony-marker-in-reasoning": "in text, markers look like control tokens",
}


def cases() -> list[Any]:
    found = []
    for name in FORMATS:
        for path in sorted((fixtures.default_fixtures_dir() / name).glob("*.jsonl")):
            for line in path.read_text().splitlines():
                case = json.loads(line)
                if not any(other in case["id"] or other in case["raw_output"] for other in OTHER_FORMATS):
                    found.append(case)
    return found


CASES = cases()


def read(case: dict[str, Any], pieces: list[str]) -> list[Event]:
    reasoning, tools = FORMATS[case["family"]]
    text, prompt = case["raw_output"], case.get("generation_prompt") or ""
    if tools == "llama3_json" and text.lstrip().startswith(("[", "<|python_start|>")):
        tools = "pythonic"
    if reasoning == "deepseek_r1" and "think" not in prompt + text:
        prompt = "</think>"
    if reasoning == "qwen3" and "<think>" not in text and (case.get("thinking") or "</think>" in text):
        prompt = "<think>"
    if reasoning == "mistral" and "<think>" in text:
        reasoning = "qwen3"
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in case["tools"]}
    thinking = REASONING_PARSERS[reasoning](prompt) if reasoning else None
    return parsed(AnswerParser(thinking, TOOL_PARSERS[tools](schemas)), pieces)


def complete_calls(events: list[Event]) -> list[dict[str, Any]]:
    calls = []
    for name, arguments in answer_of(events).calls:
        try:
            calls.append({"name": name, "arguments": json.loads(arguments)})
        except ValueError:
            continue
    return calls


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_recorded_output_parses_as_its_recorder_states(case: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if case["id"] in DIFFERENT:
        request.applymarker(pytest.mark.xfail(reason=DIFFERENT[case["id"]], strict=True))
    text = case["raw_output"]
    events = read(case, [text])
    assert read(case, list(text)) == events
    expected = case.get("expected") or {"tool_calls": []}
    assert complete_calls(events) == expected["tool_calls"]
    if "content" in expected:
        meant = answer_of(events)
        assert meant.content.strip() == (expected["content"] or "").strip()
        assert meant.reasoning.strip() == (expected["reasoning_content"] or "").strip()
