"""Which parsers a model gets."""

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
        ("<|channel|><|message|>", ParserNames("gpt_oss", "gpt_oss")),
        ("{{ tools }}: something else", ParserNames(None, None)),
    ],
)
def test_a_template_that_knows_tools_tells_its_parsers(template: str, expected: ParserNames) -> None:
    assert parsers_for(template, knows_tools=True) == expected


def test_a_template_without_tools_is_helped_out_in_the_hermes_form() -> None:
    assert parsers_for("{{ messages }}", knows_tools=False) == ParserNames("hermes", None)


def test_ernie_has_parsers_of_its_own() -> None:
    assert parsers_for("<tool_call></think>", True, "Ernie4_5ForCausalLM") == ParserNames("ernie45", "ernie45")
    assert parsers_for("<tool_call>", True, "ernie4_5") == ParserNames("ernie45", None)


def test_no_template_means_no_parsers() -> None:
    assert parsers_for(None, False) == ParserNames(None, None)
