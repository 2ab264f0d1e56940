"""Grammars of tool calls in the format of a model: calls that have to be made, or those that it chooses to make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fd_core.structured.arguments import KeywordGrammar, TaggedGrammar
from fd_core.structured.lark import LarkText, in_regex
from fd_core.structured.schemas import require_schema, require_small
from fd_core.text.parsing.contract import CallForm, FreePart


class CallAsked(NamedTuple):
    """A tool that may be called."""

    form: CallForm
    schema: dict[str, Any]
    """Of the arguments."""
    place: str
    """Of the schema in the request."""
    name: str = ""
    """Of the tool."""
    is_strict: bool = True
    """False leaves open what cannot be enforced of the schema."""


def demanded_calls(
    calls: Sequence[CallAsked],
    control_tokens: Mapping[str, int],
    *,
    several: bool,
    space: bool = False,
    before: Sequence[FreePart] = (),
    markers: Sequence[str] = (),
    instead: tuple[str, str] | None = None,
    answer_begin: str = "",
) -> str:
    """Return the grammar of an answer that is one of `calls`, or more than one if `several` and the format allows it.

    White space may stand before it if `space`, and any number of messages `before`, whose text has none of `markers`.
    `instead` is the grammar of an answer without calls, which stands behind `answer_begin`, and the field that asked
    for it. Raises `BadRequest` that names the place of a schema that cannot be held.
    """
    lark = LarkText(control_tokens)
    answers = _calls(lark, calls, several)
    if instead is not None:
        answers = f"({answers} | {lark.spelled(answer_begin)} {lark.grammar(*instead)})"
    parts = [*(["SPACE?"] if space else []), *_messages(lark, before, markers), answers]
    return _small(lark, " ".join(parts) + ("\nSPACE: /[ \\n]{1,2}/" if space else ""))


def chosen_calls(
    calls: Sequence[CallAsked],
    control_tokens: Mapping[str, int],
    *,
    before: Sequence[FreePart] = (),
    answer_begin: str = "",
    markers: Sequence[str] = (),
) -> str:
    """Return the grammar of an answer that is free but for `calls`, see `demanded_calls`.

    With `answer_begin`, an answer is calls behind any number of messages `before`, or in their place free text behind
    `answer_begin`. Where control tokens begin calls, free text has none of `markers`.
    """
    lark = LarkText(control_tokens)
    form = calls[0].form
    free = lark.terminal(lark.free_text(markers))
    if answer_begin:
        said = f"{lark.spelled(answer_begin)} {free}"
        return _small(lark, " ".join([*_messages(lark, before, markers), f"({_calls(lark, calls, True)} | {said})"]))
    if not form.anywhere:
        free = lark.terminal(rf"/([^{in_regex(form.opening[0])}\s<]|<[^|])(?s:.*)/")
        return _small(lark, f"{_calls(lark, calls, True)} | {free}?")
    if not lark.begins_with_control(form.trigger):
        markers, free = (), lark.terminal(lark.free_text())
    return _small(lark, f"{_amid_text(lark, calls, markers)}* {free}")


def _small(lark: LarkText, start: str) -> str:
    text = lark.text(start)
    require_small(text, "the grammar of all tools together", "tools")
    return text


def _messages(lark: LarkText, messages: Sequence[FreePart], markers: Sequence[str]) -> list[str]:
    """Return the expression of any number of messages, if there are any."""
    texts = [
        f"{lark.spelled(each.begin)} {lark.text_up_to(each.end, without=markers)} {lark.spelled(each.behind)}"
        for each in messages
    ]
    return [f"{lark.either(texts)}*"] if texts else []


def _calls(lark: LarkText, calls: Sequence[CallAsked], several: bool) -> str:
    """Return the rule of one call or several, with what stands around all of them."""
    form = calls[0].form
    return lark.rule(f"{lark.spelled(form.opening)} {_inner(lark, calls, several)}")


def _inner(lark: LarkText, calls: Sequence[CallAsked], several: bool) -> str:
    form = calls[0].form
    call = lark.either(f"{lark.spelled(each.form.begin)} {_behind(lark, each)}" for each in calls)
    again = f" ({lark.spelled(form.between)} {call})*" if several and form.between is not None else ""
    return f"{call}{again} {lark.spelled(form.closing)}"


def _amid_text(lark: LarkText, calls: Sequence[CallAsked], markers: Sequence[str]) -> str:
    """Return the rule of text up to a call, or up to all of them where something stands around them, and of those."""
    opening = calls[0].form.opening
    if opening:
        return lark.rule(f"{lark.text_up_to(opening, without=markers)} {_inner(lark, calls, True)}")
    behind: dict[str, list[str]] = {}
    for each in calls:
        trigger, begin = each.form.trigger, each.form.begin
        rest = lark.spelled(begin.removeprefix(trigger))
        behind.setdefault(trigger, []).append(f"{rest} {_behind(lark, each)}")
    return lark.either(
        f"{lark.text_up_to(trigger, without=markers)} {lark.either(rest)}" for trigger, rest in behind.items()
    )


def _behind(lark: LarkText, call: CallAsked) -> str:
    """Return the expression of what stands behind the beginning of a call."""
    schema = require_schema(call.schema, call.place)
    form, end = call.form.arguments, lark.spelled(call.form.end)
    if form == "json":
        return f"{lark.json({'type': 'object', **schema})} {end}"
    grammar = KeywordGrammar(lark) if form == "python" else TaggedGrammar(lark, form)
    return f"{grammar.arguments(schema, call.place)} {end}"
