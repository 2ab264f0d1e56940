"""Cuts: the result does not depend on the pieces of a response."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.parsers.target import NOW, SHOWN, ParserTarget, Words, meaning_of

PIECES = (*'{"name": "now"~, "arguments": ~```~now~weather(~\\ud83d'.split("~"), *"{}[]()<>|\"'\\,:;= \n1-aé🙂\u2028")
"""Fragments of random texts, in addition to markers."""


def require_same(target: ParserTarget, text: str, pieces: list[str], tools: tuple[str, ...]) -> None:
    found, whole = target.read(*pieces, tools=tools), target.read(text, tools=tools)
    require(found == whole, "8.1", f"the pieces {pieces!r} yield {found}; the whole text yields {whole}")


@pytest.mark.law("8.1", "8.3")
def test_calls_of_tools_that_were_not_offered_are_not_lost(target: ParserTarget) -> None:
    for answer in target.answers(Words(tool="rain")):
        tools = ("cloud", NOW)
        for cut in range(len(answer.text) + 1):
            require_same(target, answer.text, [answer.text[:cut], answer.text[cut:]], tools=tools)
        found = meaning_of(target.read(answer.text, tools=tools))
        for name, arguments in answer.calls:
            shown = any(name == each and text for each, text in found.calls)
            shown = shown or all(each in found.content for each in (name, *arguments.values()))
            what = f"calls of {answer.text!r} are {found.calls}, the content is {found.content!r}"
            expected = "expected in the calls, for the client to answer, or in the content"
            require(shown, "8.3", f"{what}; {name} with {arguments} is {expected}; the request offers {tools}")


@pytest.mark.law("8.3")
def test_the_arguments_of_a_malformed_call_are_not_lost(target: ParserTarget) -> None:
    """Leave out each character between a text and the name of a tool in turn, as models do."""
    for answer in target.answers():
        for at in range(answer.text.find(SHOWN.content) + len(SHOWN.content), answer.text.find(SHOWN.tool)):
            text = answer.text[:at] + answer.text[at + 1 :]
            found = meaning_of(target.read(text, tools=answer.tools, finish=True))
            shown = f"{found.content}{found.reasoning}{found.calls}"
            there = SHOWN.city in shown or SHOWN.city not in text
            require(there, "8.3", f"{SHOWN.city!r} is neither in the calls nor in the content of {text!r}")


@pytest.mark.law("8.1", "8.4")
def test_malformed_texts_are_handled(target: ParserTarget) -> None:
    """Parse markers and pieces of responses in random order."""
    rng = np.random.default_rng(2)
    answers = [answer.text for answer in target.answers()]
    for _ in range(600):
        parts = [str(rng.choice([*target.markers, *PIECES])) for _ in range(rng.integers(1, 12))]
        answer = answers[rng.integers(len(answers))]
        at, to = sorted(rng.integers(0, len(answer) + 1, 2).tolist())
        parts.insert(int(rng.integers(len(parts) + 1)), answer[at:to])
        text = "".join(parts)
        cut = int(rng.integers(len(text) + 1))
        require_same(target, text, [text[:cut], text[cut:]], tools=SHOWN[2:3])
        require_same(target, text, list(text), tools=SHOWN[2:3])
