"""Reasoning: its end, which activates grammars."""

from __future__ import annotations

import pytest

from fd_core.testing.axes.parts import KitCase
from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.parsers.answers import ANSWERS
from fd_core.testing.parsers.target import SHOWN, ParserTarget, meaning_of
from fd_core.text.parsing.reader import SPACE


@pytest.mark.law("8.3")
def test_the_end_of_reasoning_is_the_one_that_is_named(target: ParserTarget) -> None:
    end = target.cls.end
    if not end:
        lacks("its `end` is empty: no single marker ends reasoning, so there is no reasoning budget")
    for answer in target.answers():
        before, marker, after = answer.text.partition(end)
        require(marker, "8.3", f"{end!r} does not end the reasoning of {answer.text!r}")
        require(SHOWN.content in after, "8.3", f"the response does not follow {end!r} in {answer.text!r}")
        meaning = meaning_of(target.read(before))
        require(meaning.content == "", "8.3", f"content before {end!r}: {meaning.content!r}")
        require(meaning.reasoning.strip() == SHOWN.reasoning, "8.3", f"reasoning is {meaning.reasoning!r}")


@pytest.mark.law("8.3")
def test_reasoning_that_the_prompt_closed_does_not_begin_again(target: ParserTarget) -> None:
    """Parse after a template that disables reasoning by writing its start and end into the prompt.

    A grammar applies only once the parser says that no reasoning is left.
    """
    for answer in target.answers():
        tail, end, text = answer.text.partition(target.cls.end or answer.text)
        head, content = tail.partition(SHOWN.reasoning)[0], text.lstrip(SPACE)
        space = text[: len(text) - len(content)] or "\n"
        for prompt, rest in ((tail + end, text), (tail + end + space, content), (head + space + end + space, content)):
            begins = [target.cls.begins_reasoning(prompt, switched=switched) for switched in (True, False)]
            reasoning = meaning_of(target.read(rest, prompt=prompt)).reasoning
            if not target.cls.end or (all(begins) and reasoning):
                lacks("such a prompt does not disable its reasoning")
            require(reasoning == "", "8.3", f"reasoning after the prompt {prompt!r}, which closed it: {reasoning!r}")
            what = f"begins_reasoning is {begins} for switched or not after the prompt {prompt!r}, which closed"
            require(not any(begins), "8.3", f"{what} reasoning: a grammar would wait for {end!r}; expected False")


@pytest.mark.law("8.3")
def test_reasoning_of_an_earlier_turn_does_not_continue(target: ParserTarget) -> None:
    """Answer without reasoning after a turn that had some, of which the prompt has all or the end."""
    later = "<|user|>Why?<|assistant|>"
    for answer in target.answers():
        for earlier in (answer.text, answer.text.partition(SHOWN.reasoning)[2]):
            right, found = (
                meaning_of(target.read(SHOWN.content, prompt=prompt)) for prompt in (later, earlier + later)
            )
            if right.reasoning:
                lacks("its answers begin with reasoning")
            what = f"after the prompt {earlier + later!r}, the answer {SHOWN.content!r}"
            require(found == right, "8.3", f"{what} has the reasoning {found.reasoning!r}")


@pytest.mark.law("8.3")
def test_what_is_known_of_a_prompt_changes_no_other_call(target: ParserTarget) -> None:
    """Look at two prompts without markers: only what the template can do makes a difference, in any order of calls."""
    begins = target.cls.begins_reasoning
    first = [begins("<|user|>Hi<|assistant|>", switched=switched) for switched in (True, False)]
    second = [begins("<|user|>Why?<|assistant|>", switched=switched) for switched in (False, True)]
    require(first == second[::-1], "8.3", f"it begins with reasoning or not by the order of calls: {first}, {second}")


@pytest.mark.law("8.1", "8.3", "8.4")
@pytest.mark.fd_cases(ANSWERS)
def test_answer_with_reasoning(target: ParserTarget, case: KitCase) -> None:
    case.check(target, f"fdcore conformance --reasoning-parser {target.name}")
