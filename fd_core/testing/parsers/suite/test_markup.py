"""Markup: it is never content, also if the text is truncated or markers are repeated or missing."""

from __future__ import annotations

import re

import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.parsers.target import SHOWN, ParserTarget, meaning_of


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
