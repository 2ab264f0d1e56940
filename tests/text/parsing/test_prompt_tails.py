"""Reasoning is looked for in the last turn of a prompt."""

from __future__ import annotations

import pytest

from fd_core.text.parsing.answer import AnswerReading
from fd_core.text.parsing.contract import ReasoningParser
from fd_core.text.parsing.events import Content, ReasoningDelta
from fd_core.text.parsing.thinking import DeepSeekR1Reasoning, ErnieReasoning, QwenReasoning
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


@pytest.mark.parametrize("parser", [QwenReasoning, DeepSeekR1Reasoning, ErnieReasoning])
@pytest.mark.parametrize(
    ("last", "reasons"),
    [
        ("Well,", False),
        ("x" * 200, False),
        ("<think>\nHm.\n</think>\n\n" + "x" * 200, False),
        ("<think>\n" + "x" * 200, True),
    ],
)
def test_continued_content_reasons_only_where_it_opens_it(
    parser: type[ReasoningParser], last: str, reasons: bool
) -> None:
    reading = AnswerReading(parser, None, {}, continues=True)
    ids = TOKENIZER.encode(f"<|start|>user\nHi<|end|>\n<|start|>assistant\n{last}", add_special=False)
    tail = reading.prompt_tail(TOKENIZER, ids)
    assert parser.begins_reasoning(tail, switched=True) is reasons
    one = reading.parser(tail)
    assert [*one.push("Hi."), *one.flush()] == [ReasoningDelta("Hi.") if reasons else Content("Hi.")]


def test_plain_prompt_after_a_control_token_leaves_reasoning_to_the_model() -> None:
    reading = AnswerReading(DeepSeekR1Reasoning, None, {}, continues=True)
    ids = TOKENIZER.encode("Hi<|start|>", add_special=False)
    assert DeepSeekR1Reasoning.begins_reasoning(reading.prompt_tail(TOKENIZER, ids), switched=False)


@pytest.mark.parametrize(("last", "event"), [("", Content("Hi.")), ("<think>\n", ReasoningDelta("Hi."))])
def test_question_about_a_marker_opens_no_reasoning(last: str, event: Content | ReasoningDelta) -> None:
    reading = AnswerReading(QwenReasoning, None, {})
    ids = TOKENIZER.encode(f"<|start|>user\nWhat is <think>?<|end|>\n<|start|>assistant\n{last}", add_special=False)
    parser = reading.parser(reading.prompt_tail(TOKENIZER, ids))
    assert [*parser.push("Hi."), *parser.flush()] == [event]
