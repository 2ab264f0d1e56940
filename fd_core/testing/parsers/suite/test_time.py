"""Time: linear in the length of any text."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from fd_core.plugins import TOOL_PARSER
from fd_core.testing.kit.growth import seconds_of
from fd_core.testing.kit.law import broken
from fd_core.testing.parsers.target import SHOWN, ParserTarget, accepting

pytestmark = pytest.mark.fd_alone
SIZE = 1 << 14
PARTS = 8
SLACK = 3.0
"""Most that a character of the last part may cost, compared with one of the first part that costs most."""
FLOOR = 5e-4
"""CPU seconds of a part below which differences are noise."""
LONGEST = 2.0
"""CPU seconds that a text may take, in pieces of four characters as of tokens; the core's parsers take 0.04. All
answers of a server are parsed on one thread."""
MOST = 0.5
"""CPU seconds of one call, during which no other answer of the server is sent."""
TOOLS = tuple(f"tool_{number}" for number in range(500))
"""Other tools of each request."""
UNITS = ("{", '["', '{"a":[', '{"id":"\\"', '{"name":"', "\\", '"', "<", "`", "7", " ", "x", "xyz, ", "\\u00e9", "🙂")


def units_of(target: ParserTarget) -> list[str]:
    """Return what a text may repeat: parts of any format, markers of this one, and these without their ends."""
    return [*UNITS, *target.markers, *(marker[:-1] for marker in target.markers if marker[1:])]


def seconds(target: ParserTarget, tools: tuple[str, ...], text: str, piece: int) -> list[float]:
    """Return the CPU time to parse each part of a response in pieces of a size; the last one includes the end."""
    each, times = -(-len(text) // PARTS), list[float]()
    parser = target.new((*tools, *TOOLS))
    for part in range(0, len(text), each):
        began = time.thread_time()
        with accepting(text):
            for start in range(part, min(part + each, len(text)), piece):
                parser.push(text[start : start + piece])
            if part + each >= len(text):
                parser.flush()
        times.append(time.thread_time() - began)
        if sum(times) > LONGEST:
            pieces = f"{start // piece:,} pieces of {piece} characters, such as {text[-8:]!r},"
            broken("8.6", f"{pieces} take {sum(times):.1f} s of the processor, expected less than {LONGEST:g}")
    return times


def growth(target: ParserTarget, tools: tuple[str, ...], text: str, piece: int) -> float:
    """Return how many times as long the last part takes as the slower one of the first two, by the best of runs."""
    best = [float("inf")] * PARTS
    for _ in range(3):
        best = list(map(min, best, seconds(target, tools, text, piece)))
        ratio = max(best[-2:]) / max(*best[:2], FLOOR)
        if ratio < SLACK:
            break
    return ratio


@pytest.mark.law("8.6")
def test_time_is_linear_in_the_text(target: ParserTarget) -> None:
    """Parse 16,384 characters: the last eighth may take three times as long as the first one, in any of three runs.

    A parser that reads again what it has read, or that scans what it has emitted, takes longer for each character.
    """
    for answer in target.answers():
        begin = answer.text[: max(answer.text.find(word) for word in (SHOWN.city, SHOWN.content))]
        after = f"{answer.text} and then "
        for unit in (*units_of(target), answer.text):
            for head in (begin, after) if unit in UNITS[-4:] else (begin,):
                text = head + unit * (SIZE // len(unit) + 1)
                found = growth(target, answer.tools, text, 4)
                if found >= SLACK:
                    broken("8.6", f"the end of {len(text)} characters, each {unit!r}, takes {found:.0f} times as long")


def require_linear(took: Callable[[int], float], size: int, what: str) -> None:
    """Require eight times the size to take at most 24 times as long, and `MOST` seconds, by the best of three runs."""
    short = long = float("inf")
    for _ in range(3):
        short = min(short, took(size // PARTS))
        long = min(long, took(size))
        if long < min(PARTS * SLACK * max(short, FLOOR), MOST):
            return
    broken("8.6", f"{size:,} {what} take {long:.2g} s, {long / short:.0f} times as long as an eighth of them")


@pytest.mark.law("8.6")
def test_time_of_a_whole_text_is_linear(target: ParserTarget) -> None:
    """Parse it in one piece."""
    for answer in target.answers():
        begin = answer.text[: max(answer.text.find(word) for word in (SHOWN.city, SHOWN.content))]
        for unit in (*units_of(target), answer.text):
            text = begin + unit * (SIZE // len(unit) + 1)

            def whole(size: int, text: str = text, tools: tuple[str, ...] = answer.tools) -> float:
                parser, began = target.new((*tools, *TOOLS)), time.thread_time()
                with accepting(text):
                    parser.push(text[:size])
                    parser.flush()
                return time.thread_time() - began

            require_linear(whole, len(text), f"characters, each {unit!r},")


@pytest.mark.law("8.6")
def test_time_before_an_answer_is_linear(target: ParserTarget) -> None:
    """Construct parsers for more and for larger tools, with the forms of their calls, or for longer prompts."""

    def schema(*names: str) -> dict[str, object]:
        return {"type": "object", "properties": {name: {"type": "string"} for name in names}}

    def of_tools(count: int) -> float:
        tools = {name: schema(SHOWN.city) for name in TOOLS[:count]}
        return seconds_of(lambda: (target.new(tools), [target.form(name) for name in tools]), time.thread_time)

    def of_parameters(count: int) -> float:
        tools = {SHOWN.tool: schema(*TOOLS[:count])}
        return seconds_of(lambda: target.new(tools), time.thread_time)

    if target.kind is TOOL_PARSER:
        require_linear(of_tools, len(TOOLS), "tools before an answer")
        require_linear(of_parameters, len(TOOLS), "parameters of a tool before an answer")
        return
    for unit in units_of(target):
        prompt = unit * (SIZE // len(unit) + 1)

        def of_prompt(size: int, prompt: str = prompt) -> float:
            tail, begins = prompt[-size:], target.cls.begins_reasoning
            return seconds_of(lambda: (target.new(prompt=tail), begins(tail, True)), time.thread_time)

        require_linear(of_prompt, SIZE, f"characters of a prompt, each {unit!r},")
