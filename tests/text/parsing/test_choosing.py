"""Parsers chosen for a model."""

from __future__ import annotations

import pytest

from fd_core.text.parsing.answer import ParserNames, parsers_for


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ tools }}<tool_call>", ParserNames("hermes", None)),
        ("{{ tools }}<tool_call><think></think>", ParserNames("hermes", "qwen3")),
        ("{{ tools }}<tool_call><function=", ParserNames("qwen3_coder", None)),
        ("{{ tools }}Environment: ipython <|python_tag|>", ParserNames("llama3_json", None)),
        ("{{ tools }}<|python_start|>", ParserNames("pythonic", None)),
        ("{{ tools }}[TOOL_CALLS]", ParserNames("mistral", None)),
        ("{{ tools }}<think></think><tool_call><arg_key>", ParserNames("glm45", "qwen3")),
        ("<｜Assistant｜><｜tool▁calls▁begin｜>```json", ParserNames("deepseek", None)),
        ("<｜Assistant｜><｜tool▁calls▁begin｜>```json</think>", ParserNames("deepseek", "deepseek_r1")),
        ("<｜Assistant｜><｜tool▁calls▁begin｜></think>", ParserNames("deepseek_v31", "deepseek_r1")),
        ("{{ tools }}<minimax:tool_call><invoke name=</think>", ParserNames("minimax_m2", "qwen3")),
        ("{{ tools }}<|tool_calls_section_begin|></think>", ParserNames("kimi_k2", "qwen3")),
        ("{{ tools }}<|tool_call_start|>", ParserNames("lfm2", None)),
        ("{{ tools }}<TOOLCALL></think>", ParserNames("nemotron", "qwen3")),
        ("<|channel|><|message|>", ParserNames("gpt_oss", "gpt_oss")),
        ("{{ tools }}: something else", ParserNames(None, None)),
    ],
)
def test_parsers_follow_the_chat_template(template: str, expected: ParserNames) -> None:
    assert parsers_for(template, supports_tools=True) == expected


def test_template_without_tools_gets_hermes_parser() -> None:
    assert parsers_for("{{ messages }}", supports_tools=False) == ParserNames("hermes", None)


def test_ernie_has_its_own_parsers() -> None:
    assert parsers_for("<tool_call></think>", True, "Ernie4_5ForCausalLM") == ParserNames("ernie45", "ernie45")
    assert parsers_for("<tool_call>", True, "ernie4_5") == ParserNames("ernie45", None)


def test_no_template_means_no_parsers() -> None:
    assert parsers_for(None, False) == ParserNames(None, None)
