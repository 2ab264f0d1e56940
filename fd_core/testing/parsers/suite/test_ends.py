"""Ends: a text may end anywhere, as with `max_tokens`; emitted events are final."""

from __future__ import annotations

import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.parsers.target import ParserTarget, meaning_of, text_of


@pytest.mark.law("8.4")
def test_empty_input(target: ParserTarget) -> None:
    for pieces in ([], [""], ["", ""]):
        found = target.read(*pieces)
        require(found == [], "8.4", f"an empty text yields {found}")


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
