"""Ends: a text may end anywhere, as with `max_tokens`; emitted events are final, and no text is logged."""

from __future__ import annotations

import pytest

from fd_core.plugins import TOOL_PARSER
from fd_core.testing.kit.growth import require_bounded
from fd_core.testing.kit.law import require
from fd_core.testing.kit.privacy import kept_out_of_logs
from fd_core.testing.parsers.target import SHOWN, ParserTarget, Words, meaning_of, text_of

_PRIVATE = "of one user only"


@pytest.mark.law("8.4")
def test_truncated_output_is_kept(target: ParserTarget) -> None:
    for kind, answer, begin in target.long_answers(40):
        for length in range(1, 40):
            events = target.read(*answer.text[: begin + length], tools=answer.tools)
            there = text_of(events, kind).count("x")
            require(there == length, "8.4", f"expected {length} characters of {kind.__name__}, got {there}")
            require(not meaning_of(events).ended, "8.4", "a truncated call has an end")


@pytest.mark.law("8.4")
@pytest.mark.fd_alone
def test_nothing_remains_of_many_answers(target: ParserTarget) -> None:
    """Read answers, each once, to one end or another or none; tools, their schemas and prompts are others each time."""

    def use(number: int) -> None:
        shown, key = f"{SHOWN.tool}{number}", f"key{number}"
        schema = {"type": "object", "properties": {key: {"enum": [f"value {number}"]}}}
        target.form(shown)
        for answer in target.answers():
            tools = {shown: schema, **{name: {**schema, "title": f"{number}"} for name in answer.tools}}
            prompt = f"{number} {answer.text} {number}"
            parser = target.new(tools, prompt)
            if target.kind is not TOOL_PARSER:
                target.cls.begins_reasoning(prompt, True)
            parser.push(prompt)
            (parser.flush, parser.finish, tuple)[number % 3]()

    require_bounded(use, 100, "answers", "8.4")


@pytest.mark.law("8")
def test_no_text_of_an_answer_is_in_a_log(target: ParserTarget) -> None:
    """Read answers, also truncated and malformed ones."""
    for answer in target.answers(Words(_PRIVATE, _PRIVATE, city=_PRIVATE)):
        with kept_out_of_logs(_PRIVATE.encode()):
            for text in (answer.text, answer.text[:-8], *(answer.text.replace(each, "", 1) for each in '{":}')):
                target.read(*text, tools=answer.tools)
                target.read(text, tools=())
