"""Parsers emit as early as possible, in time linear in the text."""

from __future__ import annotations

import json
import time

import pytest
from recorded import RECORDED, TOOL_PARSERS, TOOLS, parser

from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content, Event, ReasoningDelta, joined
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.formats.pythonic import PythonicTools
from fd_core.text.parsing.reader import Steps, TextReader
from fd_core.text.parsing.thinking import QwenReasoning


def test_content_is_streamed_immediately() -> None:
    reading = HermesTools(TOOLS)
    assert [list(reading.push(each)) for each in ("Hel", "lo <", "b> ", "x")] == [
        [Content("Hel")],
        [Content("lo")],
        [Content(" <b>")],
        [Content(" x")],
    ]


def test_call_name_then_arguments_are_streamed() -> None:
    reading = HermesTools(TOOLS)
    assert list(reading.push('<tool_call>{"name": "weat')) == []
    assert list(reading.push('her", "argum')) == [CallBegun(0, "weather")]
    assert list(reading.push('ents": {"ci')) == [ArgumentsDelta(0, '{"ci')]
    assert list(reading.push('ty": "Rome"}')) == [ArgumentsDelta(0, 'ty": "Rome"}'), CallEnded(0)]


def test_reasoning_is_streamed_and_later_content_unchanged() -> None:
    reading = QwenReasoning("<think>\n")
    assert list(reading.push("Hm <")) == [ReasoningDelta("Hm")]
    assert list(reading.push("/think")) == []
    assert list(reading.push(">\n\nYes")) == [Content("Yes")]
    assert list(reading.push(' {"a": "<think>"} \n')) == [Content(' {"a": "<think>"} \n')]


class Dashes(TextReader):
    """Content between markers, one of which is a prefix of another and occurs inside a third."""

    def run(self) -> Steps[None]:
        while marker := (yield from self.content_until("--", "--->", "=--=")):
            self.emit_reasoning(marker)


@pytest.mark.parametrize(
    ("text", "marks"), [("a--b--->c---d--", ["--", "--->", "--", "--"]), ("a=--=b=--c=--=", ["=--=", "--", "=--="])]
)
def test_first_and_longest_marker_wins_for_any_chunking(text: str, marks: list[str]) -> None:
    def read(*pieces: str) -> list[Event]:
        reading = Dashes()
        return joined([*(event for piece in pieces for event in reading.push(piece)), *reading.flush()])

    assert [event.text for event in read(text) if isinstance(event, ReasoningDelta)] == marks
    for cut in range(len(text)):
        assert read(text[:cut], text[cut:]) == read(*text) == read(text)


def test_one_character_marker_is_found_immediately() -> None:
    class Bars(TextReader):
        def run(self) -> Steps[None]:
            while (yield from self.content_until("|")):
                self.emit_reasoning("|")

    assert list(Bars().push("a|")) == [Content("a"), ReasoningDelta("|")]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.timing
def test_parse_time_is_linear(name: str) -> None:
    """A text a hundred times as long must not take anything like ten thousand times as long."""
    opening = next(each.text for each in RECORDED.values() if each.tools == name and each.means.calls)
    for tail in ("x" * 60_000, " " * 20_000, "{" * 20_000, '\\"' * 20_000):
        reading = parser(None, name)
        began = time.perf_counter()
        for start in range(0, len(tail), 4):
            reading.push((opening[:-12] if start == 0 else "") + tail[start : start + 4])
        reading.flush()
        assert time.perf_counter() - began < 10


@pytest.mark.parametrize("end", ["`", "``"])
def test_backticks_at_the_end_of_truncated_content_are_kept(end: str) -> None:
    reading = parser(None, "llama3_json")
    events = joined([*reading.push(f"Call it `z{end}"), *reading.flush()])
    assert events == [Content(f"Call it `z{end}")]


def test_adjacent_python_strings_are_one_for_any_chunking() -> None:
    text = """[weather(city='Ro' "me's", note='''x''', days={'a' "b": 'c' })]"""
    for cut in range(len(text)):
        reading = PythonicTools(TOOLS)
        found = [*reading.push(text[:cut]), *reading.push(text[cut:]), *reading.flush()]
        arguments = "".join(event.text for event in found if isinstance(event, ArgumentsDelta))
        assert json.loads(arguments) == {"city": "Rome's", "note": "x", "days": {"ab": "c"}}, cut
