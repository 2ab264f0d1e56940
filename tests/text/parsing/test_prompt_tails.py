"""Reasoning is looked for in the last turn of a prompt."""

from __future__ import annotations

import pytest

from fd_core.text.parsing.answer import AnswerReading
from fd_core.text.parsing.contract import ReasoningParser
from fd_core.text.parsing.events import Content, ReasoningDelta
from fd_core.text.parsing.thinking import QwenReasoning
from fd_core.text.tokenizer import load_tokenizer
from tests.text.small_tokenizers import byte_level_metadata, ggml

TOKENIZER = load_tokenizer(ggml(byte_level_metadata([])))


class StartIsAMarker(QwenReasoning):
    begin = "<|start|>"
    markers = ("<|start|>", "</think>")


@pytest.mark.parametrize(
    ("prompt", "parser", "tail"),
    [
        ("<|start|>What is <think>?<|end|>\n<|start|>assistant\n", QwenReasoning, "assistant\n"),
        ("<|start|>What is </think>?<|end|>\n<|start|>assistant\n<think>\n", QwenReasoning, "assistant\n<think>\n"),
        ("no control tokens <think>", QwenReasoning, "no control tokens <think>"),
        ("Hi<|end|>\n<|start|>assistant", StartIsAMarker, "\n<|start|>assistant"),
    ],
)
def test_tail_of_a_prompt_is_its_last_turn(prompt: str, parser: type[ReasoningParser], tail: str) -> None:
    ids = TOKENIZER.encode(prompt, add_special=False)
    assert AnswerReading(parser, None, {}).prompt_tail(TOKENIZER, ids) == tail


@pytest.mark.parametrize(("last", "event"), [("", Content("Hi.")), ("<think>\n", ReasoningDelta("Hi."))])
def test_question_about_a_marker_opens_no_reasoning(last: str, event: Content | ReasoningDelta) -> None:
    reading = AnswerReading(QwenReasoning, None, {})
    ids = TOKENIZER.encode(f"<|start|>user\nWhat is <think>?<|end|>\n<|start|>assistant\n{last}", add_special=False)
    parser = reading.parser(reading.prompt_tail(TOKENIZER, ids))
    assert [*parser.push("Hi."), *parser.flush()] == [event]
