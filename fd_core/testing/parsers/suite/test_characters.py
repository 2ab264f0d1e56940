"""Characters: none is lost or repeated."""

from __future__ import annotations

import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.kit.privacy import kept_out_of_logs
from fd_core.testing.parsers.target import ParserTarget, Words, meaning_of
from fd_core.text.parsing.reader import SPACE

_PRIVATE = "of one user only"
PLAIN = {
    "a letter": "a",
    "scripts": "Röm 🙂, 東京\u2028\u200f; e\u0301 and 👩‍👩‍👧\u00a0.",
    "edges": "0\x00\ufeff\ufffd\U0010ffff",
    "lines": "two\r\n\tlines \n\n",
    "spaces": "it ends with space   ",
    "indentation": "\n\n    it begins with space",
    "words": "null, 0 and false",
}


def require_all(target: ParserTarget, text: str) -> None:
    for pieces in ([text], list(text)):
        meaning = meaning_of(target.read(*pieces))
        content = meaning.content + meaning.reasoning
        # White space around the beginning of reasoning, which may have no marker, belongs to it.
        same = content == text or (bool(meaning.reasoning) and content == text.lstrip(SPACE))
        require(same and not meaning.calls, "8.3", f"text {content!r} and calls {meaning.calls} from {text!r}")


@pytest.mark.law("8.3")
@pytest.mark.parametrize("text", PLAIN)
def test_text_without_markers_is_emitted_unchanged(target: ParserTarget, text: str) -> None:
    require_all(target, PLAIN[text])


@pytest.mark.law("8.3")
def test_half_a_marker_before_other_text_is_text(target: ParserTarget) -> None:
    for half in target.half_markers:
        require_all(target, f"so \n{half}~ it is")


@pytest.mark.law("8.3")
def test_a_marker_in_other_case_is_text(target: ParserTarget) -> None:
    for marker in target.markers:
        if marker.swapcase() != marker:
            require_all(target, f"so {marker.swapcase()} it is")


@pytest.mark.law("8")
def test_no_text_of_an_answer_is_in_a_log(target: ParserTarget) -> None:
    """Read answers, also truncated and malformed ones."""
    for answer in target.answers(Words(_PRIVATE, _PRIVATE, city=_PRIVATE)):
        with kept_out_of_logs(_PRIVATE.encode()):
            for text in (answer.text, answer.text[:-8], *(answer.text.replace(each, "", 1) for each in '{":}')):
                target.read(*text, tools=answer.tools)
                target.read(text, tools=())
