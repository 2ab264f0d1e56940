"""Parsers wait no longer than they must, and cost what the text is long."""

from __future__ import annotations

import time

import pytest
from recorded import RECORDED, TOOL_PARSERS, TOOLS, parser

from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content, Event, Thought, joined
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.reader import Steps, TextReader
from fd_core.text.parsing.thinking import QwenReasoning


def test_content_goes_out_as_it_comes() -> None:
    reading = HermesTools(TOOLS)
    assert [list(reading.push(each)) for each in ("Hel", "lo <", "b> ", "x")] == [
        [Content("Hel")],
        [Content("lo")],
        [Content(" <b>")],
        [Content(" x")],
    ]


def test_a_call_begins_with_its_name_and_arguments_follow_as_they_come() -> None:
    reading = HermesTools(TOOLS)
    assert list(reading.push('<tool_call>{"name": "weat')) == []
    assert list(reading.push('her", "argum')) == [CallBegun(0, "weather")]
    assert list(reading.push('ents": {"ci')) == [ArgumentsDelta(0, '{"ci')]
    assert list(reading.push('ty": "Rome"}')) == [ArgumentsDelta(0, 'ty": "Rome"}'), CallEnded(0)]


def test_reasoning_goes_out_as_it_comes_and_content_behind_it_is_not_touched() -> None:
    reading = QwenReasoning("<think>\n")
    assert list(reading.push("Hm <")) == [Thought("Hm")]
    assert list(reading.push("/think")) == []
    assert list(reading.push(">\n\nYes")) == [Content("Yes")]
    assert list(reading.push(' {"a": "<think>"} \n')) == [Content(' {"a": "<think>"} \n')]


class Dashes(TextReader):
    """Content between marks, of which one is the beginning of another and stands within a third."""

    def run(self) -> Steps[None]:
        while marker := (yield from self.content_until("--", "--->", "=--=")):
            self.say_reasoning(marker)


@pytest.mark.parametrize(
    ("text", "marks"), [("a--b--->c---d--", ["--", "--->", "--", "--"]), ("a=--=b=--c=--=", ["=--=", "--", "=--="])]
)
def test_the_first_and_longest_marker_is_found_whatever_the_cuts(text: str, marks: list[str]) -> None:
    def read(*pieces: str) -> list[Event]:
        reading = Dashes()
        return joined([*(event for piece in pieces for event in reading.push(piece)), *reading.flush()])

    assert [event.text for event in read(text) if isinstance(event, Thought)] == marks
    for cut in range(len(text)):
        assert read(text[:cut], text[cut:]) == read(*text) == read(text)


def test_a_marker_of_one_character_is_found_at_once() -> None:
    class Bars(TextReader):
        def run(self) -> Steps[None]:
            while (yield from self.content_until("|")):
                self.say_reasoning("|")

    assert list(Bars().push("a|")) == [Content("a"), Thought("|")]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.timing
def test_a_long_answer_costs_what_it_is_long(name: str) -> None:
    """A hundred times the text must not take anything like ten thousand times as long."""
    opening = next(each.text for each in RECORDED.values() if each.tools == name and each.means.calls)
    for tail in ("x" * 60_000, " " * 20_000, "{" * 20_000, '\\"' * 20_000):
        reading = parser(None, name)
        began = time.perf_counter()
        for start in range(0, len(tail), 4):
            reading.push((opening[:-12] if start == 0 else "") + tail[start : start + 4])
        reading.flush()
        assert time.perf_counter() - began < 10
