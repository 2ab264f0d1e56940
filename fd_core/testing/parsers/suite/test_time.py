"""Time: linear in the length of any text."""

from __future__ import annotations

import time

import pytest

from fd_core.testing.kit.law import broken
from fd_core.testing.parsers.target import SHOWN, ParserTarget

pytestmark = pytest.mark.fd_alone
SIZE = 200
GROWTH = 8
SLACK = 3
UNITS = ("{", '["', '{"a":[', '{"id":"\\"', '{"name":"', "\\", '"', "<", "`", "7", " ", "x")


def seconds(target: ParserTarget, tools: tuple[str, ...], text: str, piece: int) -> float:
    """Return the CPU time to parse a response in pieces of a size."""
    parser = target.new(tools)
    began = time.thread_time()
    for start in range(0, len(text), piece):
        parser.push(text[start : start + piece])
    parser.flush()
    return time.thread_time() - began


@pytest.mark.law("8.6")
def test_time_is_linear_in_the_text(target: ParserTarget) -> None:
    """Require that eight times the text takes at most 24 times as long, in one of three measurements."""
    for answer in target.answers():
        begin = answer.text[: max(answer.text.find(word) for word in (SHOWN.city, SHOWN.content))]
        for unit in (*UNITS, *target.markers, *(marker[:-1] for marker in target.markers), answer.text):
            text = begin + unit * (SIZE * GROWTH // len(unit) + 1)
            for piece in (4, len(text)):
                for _ in range(3):
                    short = seconds(target, answer.tools, text[: len(begin) + SIZE], piece=piece)
                    long = seconds(target, answer.tools, text, piece=piece)
                    if long < max(0.02, short * GROWTH * SLACK):
                        break
                else:
                    broken("8.6", f"{len(text)} characters, each {unit!r}, take {long / short:.0f} times as long")
