"""Ends: a text may end anywhere, as with `max_tokens`; emitted events are final."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import pytest

from fd_core.plugins import TOOL_PARSER
from fd_core.testing.kit.growth import require_bounded
from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.parsers.target import SHOWN, ParserTarget, meaning_of, text_of
from fd_core.text.parsing.contract import OutputParser


@pytest.mark.law("8.4")
def test_a_text_may_end_anywhere(target: ParserTarget) -> None:
    """Check that no call has a wrong name, and that no truncated call has an end."""
    for answer in target.answers():
        whole = meaning_of(target.read(answer.text, tools=answer.tools))
        for end in range(len(answer.text)):
            text = answer.text[:end]
            found = meaning_of(target.read(text, tools=answer.tools))
            same = [name for name, _ in found.calls] == [name for name, _ in whole.calls[: len(found.calls)]]
            require(same, "8.4", f"{text!r} yields the calls {[name for name, _ in found.calls]}")
            ended = found.calls[: found.ended] == whole.calls[: found.ended]
            require(ended, "8.4", f"a truncated call of {text!r} has an end: {found.calls}")


@pytest.mark.law("8.4")
def test_truncated_output_is_kept(target: ParserTarget) -> None:
    for kind, answer, begin in target.long_answers(40):
        for length in range(1, 40):
            events = target.read(*answer.text[: begin + length], tools=answer.tools)
            there = text_of(events, kind).count("x")
            require(there == length, "8.4", f"expected {length} characters of {kind.__name__}, got {there}")
            require(not meaning_of(events).ended, "8.4", "a truncated call has an end")


@pytest.mark.law("8.4")
def test_a_parser_is_freed_with_its_answer(target: ParserTarget) -> None:
    """Also if the client has left, so that the text has no end."""
    left = list[tuple[str, weakref.ref[OutputParser]]]()
    for answer in target.answers():
        for end, abandoned in product((len(answer.text) // 2, len(answer.text)), (False, True)):
            parser = target.new(answer.tools)
            try:
                left.append((answer.text[:end], weakref.ref(parser)))
            except TypeError:
                lacks("its parsers have no weak references")
            parser.push(answer.text[:end])
            if not abandoned:
                parser.flush()
            del parser
    gc.collect()
    kept = [text for text, parser in left if parser() is not None]
    require(not kept, "8.4", f"the parsers of {kept} are still referenced after the answers")


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
