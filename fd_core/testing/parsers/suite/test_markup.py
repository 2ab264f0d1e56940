"""Markup: it is never content, also if markers are repeated or missing; what only looks like it is text."""

from __future__ import annotations

import re

import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.parsers.target import SHOWN, ParserTarget, meaning_of
from fd_core.text.parsing.reader import SPACE


@pytest.mark.law("8.5")
def test_markers_doubled_or_left_out_are_no_content(target: ParserTarget) -> None:
    """Repeat or drop markers; calls that were complete before must remain."""
    for answer in target.answers():
        places = [(at, m) for m in target.markers for at in range(len(answer.text)) if answer.text.startswith(m, at)]
        for at, marker in places:
            before, after = answer.text[:at], answer.text[at + len(marker) :]
            kept = meaning_of(target.read(before, tools=answer.tools))
            for text in (f"{before}{marker}{marker}{after}", f"{before}{marker}\n{marker}{after}", before + after):
                events = target.read(text, tools=answer.tools)
                pieces = target.read(*text, tools=answer.tools)
                require(pieces == events, "8.1", f"pieces of {text!r} yield another result")
                found = meaning_of(events)
                there = [each for each in target.markers if each in found.content]
                require(not there, "8.5", f"content of {text!r} is {found.content!r}")
                same = found.calls[: kept.ended] == kept.calls[: kept.ended]
                require(same, "8.5", f"calls of {text!r} are {found.calls}; complete before the fault: {kept.calls}")


def require_all(target: ParserTarget, text: str) -> None:
    for pieces in ([text], list(text)):
        meaning = meaning_of(target.read(*pieces))
        content = meaning.content + meaning.reasoning
        # White space around the beginning of reasoning, which may have no marker, belongs to it.
        same = content == text or (bool(meaning.reasoning) and content == text.lstrip(SPACE))
        require(same and not meaning.calls, "8.3", f"text {content!r} and calls {meaning.calls} from {text!r}")


@pytest.mark.law("8.3")
def test_text_without_markers_is_emitted_unchanged(target: ParserTarget) -> None:
    require_all(
        target, "\n\n    null, 0 and false:\r\n\tRöm 🙂 \u2028\u200f\x00\ufeff\ufffd\U0010ffff e\u0301 \u00a0.   "
    )


@pytest.mark.law("8.3")
def test_a_marker_in_other_case_is_text(target: ParserTarget) -> None:
    for marker in target.markers:
        if marker.swapcase() != marker:
            require_all(target, f"so {marker.swapcase()} it is")


_TAG = re.compile(r"<[^<>\s=\"]+>|\[[A-Z_/]+\]")
"""Strings of the kind that are control tokens in most vocabularies."""


@pytest.mark.law("8.5")
def test_tags_of_the_format_are_markers(target: ParserTarget) -> None:
    """Look for tags in the sample and the form."""
    texts = [answer.text for answer in target.answers()]
    if (form := target.form(SHOWN.tool)) is not None:
        texts += [form.opening, form.begin, form.end, form.closing]
    for tag in sorted({tag for text in texts for tag in _TAG.findall(text)}):
        what = f"the format has {tag!r}, which is not in `markers`"
        fault = "if it is a control token, the server removes it from the text that the parser reads"
        require(any(tag in marker for marker in target.markers), "8.5", f"{what}: {fault}")
