"""Parsers chosen by `fdcore serve`, and the reasons it prints."""

from __future__ import annotations

import pytest

from fd_core.cli.serving.startup import choose_parsers
from fd_core.errors import PluginError
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.parsing.formats.json_calls import HermesTools, LlamaJsonTools
from fd_core.text.parsing.thinking import QwenReasoning

QWEN = ChatTemplate("{{ tools }}<tool_call></tool_call><think></think>")
PLAIN = ChatTemplate("{{ messages }}")


def test_auto_chooses_by_chat_template_and_explains() -> None:
    chosen = choose_parsers("auto", "auto", QWEN, "Qwen3ForCausalLM")
    assert (chosen.parsers.tools, chosen.parsers.reasoning) == (HermesTools, QwenReasoning)
    assert (chosen.tools, chosen.reasoning) == ("hermes (fits the chat template)", "qwen3 (fits the chat template)")


def test_no_parser_is_reported_with_the_flag_that_sets_one() -> None:
    chosen = choose_parsers("auto", "auto", PLAIN, "")
    assert chosen.parsers.tools is HermesTools and chosen.parsers.reasoning is None
    assert (
        chosen.reasoning.startswith("none: no reasoning parser is known") and "--reasoning-parser" in chosen.reasoning
    )
    assert choose_parsers("auto", "auto", None, "").parsers.tools is None


def test_flag_names_a_parser_or_none() -> None:
    chosen = choose_parsers("llama3_json", "none", QWEN, "")
    assert (chosen.parsers.tools, chosen.parsers.reasoning) == (LlamaJsonTools, None)
    assert (chosen.tools, chosen.reasoning) == ("llama3_json", "none")


def test_unknown_parser_is_rejected_with_known_ones() -> None:
    with pytest.raises(PluginError, match="unknown tool parser 'best'") as caught:
        choose_parsers("best", "auto", QWEN, "")
    assert caught.value.field == "--tool-call-parser" and "hermes" in caught.value.hint


def test_tool_template_chooses_the_tool_parser() -> None:
    named = {"tool_use": "{{ tools }}Environment: ipython"}
    chosen = choose_parsers("auto", "auto", ChatTemplate("{{ messages }}<think></think>", named=named), "")
    assert (chosen.parsers.tools, chosen.parsers.reasoning) == (LlamaJsonTools, QwenReasoning)
    assert choose_parsers("auto", "auto", ChatTemplate("", named=named), "").parsers.tools is LlamaJsonTools
