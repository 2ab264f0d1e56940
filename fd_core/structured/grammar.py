"""Output constraints of a request, as data: any process can make the grammar of one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from llguidance import LLMatcher

from fd_core.structured.arguments import KeywordGrammar, TaggedGrammar
from fd_core.structured.lark import JSON_STYLE, LarkText, as_lark, in_regex, literal
from fd_core.structured.schemas import (
    MAX_CHOICES,
    require_few_repeats,
    require_schema,
    require_small,
    with_exact_formats,
    wrong,
)
from fd_core.structured.tags import structural_tag
from fd_core.text.parsing.contract import CallForm, FreePart


class RequestedCall(NamedTuple):
    """A tool that may be called."""

    form: CallForm
    schema: dict[str, Any]
    """Schema of the arguments."""
    location: str
    """Location of the schema in the request."""
    name: str = ""
    is_strict: bool = True
    """False ignores the parts of the schema that cannot be enforced."""


def _messages(lark: LarkText, messages: Sequence[FreePart], markers: Sequence[str]) -> list[str]:
    texts = [
        f"{lark.spelled(each.begin)} {lark.text_up_to(each.end, without=markers)} {lark.spelled(each.behind)}"
        for each in messages
    ]
    return [f"{lark.either(texts)}*"] if texts else []


def _calls(lark: LarkText, calls: Sequence[RequestedCall], several: bool) -> str:
    """Return the rule of one call or several, with the markers around all of them."""
    form = calls[0].form
    return lark.rule(f"{lark.spelled(form.opening)} {_inner(lark, calls, several)}")


def _inner(lark: LarkText, calls: Sequence[RequestedCall], several: bool) -> str:
    form = calls[0].form
    call = lark.either(f"{lark.spelled(each.form.begin)} {_rest_of_call(lark, each)}" for each in calls)
    again = f" ({lark.spelled(form.between)} {call})*" if several and form.between is not None else ""
    return f"{call}{again} {lark.spelled(form.closing)}"


def _amid_text(lark: LarkText, calls: Sequence[RequestedCall], markers: Sequence[str]) -> str:
    """Return the rule of text followed by a call, or by all calls if the format has markers around them."""
    opening = calls[0].form.opening
    if opening:
        return lark.rule(f"{lark.text_up_to(opening, without=markers)} {_inner(lark, calls, True)}")
    rest_by_trigger: dict[str, list[str]] = {}
    for each in calls:
        trigger, begin = each.form.trigger, each.form.begin
        rest = lark.spelled(begin.removeprefix(trigger))
        rest_by_trigger.setdefault(trigger, []).append(f"{rest} {_rest_of_call(lark, each)}")
    return lark.either(
        f"{lark.text_up_to(trigger, without=markers)} {lark.either(rest)}" for trigger, rest in rest_by_trigger.items()
    )


def _rest_of_call(lark: LarkText, call: RequestedCall) -> str:
    schema = require_schema(call.schema, call.location)
    form, end = call.form.arguments, lark.spelled(call.form.end)
    if form == "json":
        return f"{lark.json({'type': 'object', **schema})} {end}"
    if form == "python":
        return f"{KeywordGrammar(lark, schema, call.location).arguments()} {end}"
    return f"{TaggedGrammar(lark, schema, call.location, form=form).arguments()} {end}"


def json_schema(
    schema: Mapping[str, Any] | bool, *, whitespace_pattern: str | None = None, field: str = "json_schema"
) -> str:
    """Return the grammar of the JSON values that match a schema, with properties in the order of the schema.

    JSON is written on one line with one space after commas and colons, or with text that matches `whitespace_pattern`
    wherever white space is allowed. Raises `BadRequest` that names `field`.
    """
    if schema is False:
        raise wrong(field, "no value matches the schema false")
    text = json.dumps(with_exact_formats(require_schema(schema, field)))
    style: Any = JSON_STYLE if whitespace_pattern is None else {"whitespace_pattern": whitespace_pattern}
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=style)
    except ValueError as error:
        raise wrong(field, f"the schema cannot be used: {error}") from None


def regex(pattern: str, *, field: str = "regex") -> str:
    """Return the grammar of the texts that a regular expression matches as a whole. Raises `BadRequest`."""
    require_small(pattern, "the regular expression", field)
    require_few_repeats(pattern, field)
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str], *, field: str = "choice") -> str:
    """Return the grammar of a few given texts. Raises `BadRequest` if there are none, too many or too long ones."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise wrong(field, f"there are {len(texts)} choices; expected 1 to {MAX_CHOICES}")
    require_small("".join(texts), "all choices together", field)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(literal(text) for text in dict.fromkeys(texts)))


def context_free(text: str, *, field: str = "grammar") -> str:
    """Return the grammar written in Lark's syntax (rule `start`), or in GBNF (rule `root`). Raises `BadRequest`."""
    require_small(text, "the grammar", field)
    require_few_repeats(text, field)
    return LLMatcher.grammar_from_lark(as_lark(text, field))


Schema = dict[str, Any] | bool


class SchemaConstraint(msgspec.Struct, frozen=True, kw_only=True, tag="schema"):
    """JSON values that match a schema."""

    schema: Schema
    whitespace_pattern: str | None = None
    spaces_field: str = ""
    """Location of the pattern in the request, if there is one."""
    is_strict: bool = True
    """False ignores the parts that cannot be enforced."""

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        return json_schema(self.schema, whitespace_pattern=self.whitespace_pattern, field=field)


class GrammarConstraint(msgspec.Struct, frozen=True, tag="text"):
    """A regular expression, or a grammar in Lark's syntax or in GBNF."""

    kind: Literal["regex", "grammar"]
    text: str

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        make = regex if self.kind == "regex" else context_free
        return make(self.text, field=field)


class ChoiceConstraint(msgspec.Struct, frozen=True, tag="choice"):
    """One of a few texts."""

    texts: list[str]

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        return choice(self.texts, field=field)


class TagConstraint(msgspec.Struct, frozen=True, tag="tag"):
    """A structural tag."""

    tag: dict[str, Any]

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        return structural_tag(self.tag, field=field)


class CallsConstraint(msgspec.Struct, frozen=True, kw_only=True, tag="calls"):
    """Required tool calls, or calls that the model may choose to make."""

    calls: list[RequestedCall]
    control_tokens: dict[str, int]
    is_demanded: bool
    before: Sequence[FreePart] = ()
    """Any number of these messages may precede the calls; their text has none of `markers`."""
    markers: Sequence[str] = ()
    """Free text has none of them where control tokens begin calls."""
    answer_begin: str = ""
    """Prefix of an answer without calls."""
    several: bool = False
    """True if more than one call is allowed, where the format supports it."""
    space: bool = False
    """True if white space may precede required calls."""
    instead: RequestedConstraint | None = None
    """Output constraint of an answer without calls."""

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest` that names the location of a schema that cannot be enforced."""
        lark = LarkText(self.control_tokens)
        text = lark.text(self._demanded(lark) if self.is_demanded else self._chosen(lark))
        require_small(text, "the grammar of all tools together", "tools")
        return text

    def _demanded(self, lark: LarkText) -> str:
        other = None if self.instead is None else (self.instead.grammar(), self.instead.field)
        answers = _calls(lark, self.calls, self.several)
        if other is not None:
            answers = f"({answers} | {lark.spelled(self.answer_begin)} {lark.grammar(*other)})"
        parts = [*(["SPACE?"] if self.space else []), *_messages(lark, self.before, self.markers), answers]
        return " ".join(parts) + ("\nSPACE: /[ \\n]{1,2}/" if self.space else "")

    def _chosen(self, lark: LarkText) -> str:
        form, markers = self.calls[0].form, self.markers
        free = lark.terminal(lark.free_text(markers))
        if self.answer_begin:
            answer = f"{lark.spelled(self.answer_begin)} {free}"
            return " ".join([*_messages(lark, self.before, markers), f"({_calls(lark, self.calls, True)} | {answer})"])
        if not form.anywhere:
            free = lark.terminal(rf"/([^{in_regex(form.opening[0])}\s<]|<[^|])(?s:.*)/")
            return f"{_calls(lark, self.calls, True)} | {free}?"
        if not lark.begins_with_control(form.trigger):
            markers, free = (), lark.terminal(lark.free_text())
        return f"{_amid_text(lark, self.calls, markers)}* {free}"


OutputConstraint = SchemaConstraint | GrammarConstraint | ChoiceConstraint | TagConstraint | CallsConstraint


class RequestedConstraint(msgspec.Struct, frozen=True):
    """An output constraint, and the field of the request that specifies it."""

    field: str
    constraint: OutputConstraint

    def grammar(self) -> str:
        """Return the grammar, not yet compiled. Raises `BadRequest` that names the location."""
        return self.constraint.grammar(self.field)
