"""Waiting: text is held back only if it may be the beginning of a marker, or white space before one."""

from __future__ import annotations

import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.parsers.target import ParserTarget, text_of
from fd_core.text.parsing.events import CallBegun


def require_prompt(target: ParserTarget, text: str) -> None:
    """Push text without markup, character by character; text is released once it cannot be a marker."""
    emitted = ""
    for end, events in enumerate(target.listen(*text), 1):
        emitted += text_of(events)
        held = text[len(emitted) : end].lstrip()
        may_begin = any(marker.startswith(held) for marker in target.markers)
        require(not held or may_begin, "8.2", f"{held!r} is held back in {text[:end]!r}, but cannot begin a marker")


@pytest.mark.law("8.2")
def test_text_that_is_no_marker_is_emitted_at_once(target: ParserTarget) -> None:
    for half in target.half_markers:
        require_prompt(target, f"so {half}~ it is")


@pytest.mark.law("8.2")
def test_no_part_of_an_answer_waits_for_its_end(target: ParserTarget) -> None:
    """Push 300 characters of content, of reasoning, or of an argument, one by one."""
    for kind, answer, begin in target.long_answers(300):
        emitted = 0
        for end, events in enumerate(target.listen(*answer.text, tools=answer.tools), 1 - begin):
            emitted += text_of(events, kind).count("x")
            late = min(end, 300) - emitted
            require(late <= target.patience, "8.2", f"{late} characters are held back, each a {kind.__name__}")


@pytest.mark.law("8.2")
def test_a_call_begins_before_its_arguments_are_there(target: ParserTarget) -> None:
    for answer in target.answers():
        for index, (name, arguments) in enumerate(answer.calls):
            if arguments:
                before = answer.text[: answer.text.index(arguments["city"])]
                events = next(target.listen(before, tools=answer.tools))
                names = [event.name for event in events if isinstance(event, CallBegun)]
                require(names[index:] == [name], "8.2", f"{name} has not begun at its first argument")
