"""The form that a request asks for, as data: any process can make the grammar of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher

from fd_core.errors import BadRequest
from fd_core.structured.calls import CallAsked, chosen_calls, demanded_calls
from fd_core.structured.lark import JSON_STYLE, as_lark, literal
from fd_core.structured.schemas import MAX_CHOICES, require_few_repeats, require_schema, require_small
from fd_core.structured.tags import structural_tag
from fd_core.text.parsing.contract import FreePart

__all__ = [
    "CallsForm",
    "ChoiceForm",
    "Form",
    "FormAsked",
    "Schema",
    "SchemaForm",
    "TagForm",
    "TextForm",
    "choice",
    "context_free",
    "json_object",
    "json_schema",
    "regex",
    "structural_tag",
]


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"})


def json_schema(
    schema: Mapping[str, Any] | bool, *, whitespace_pattern: str | None = None, field: str = "json_schema"
) -> str:
    """Return the grammar of the JSON values that fit a schema, whose property order is that of the answer.

    JSON is written on one line with one blank behind commas and colons, or with what matches `whitespace_pattern`
    wherever white space is allowed. Raises `BadRequest` that names `field`.
    """
    if schema is False:
        raise BadRequest(f"{field}: no value fits the schema false", field=field)
    text = json.dumps(require_schema(schema, field))
    style: Any = JSON_STYLE if whitespace_pattern is None else {"whitespace_pattern": whitespace_pattern}
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=style)
    except ValueError as error:
        raise BadRequest(f"{field}: the schema cannot be used: {error}", field=field) from None


def regex(pattern: str, *, field: str = "regex") -> str:
    """Return the grammar of the texts that a regular expression matches as a whole. Raises `BadRequest`."""
    require_small(pattern, "the regular expression", field)
    require_few_repeats(pattern, field)
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str], *, field: str = "choice") -> str:
    """Return the grammar of a few given texts. Raises `BadRequest` if there are none, too many or too long ones."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise BadRequest(f"{field}: there are {len(texts)} choices; allowed are 1 to {MAX_CHOICES}", field=field)
    require_small("".join(texts), "all choices together", field)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(literal(text) for text in dict.fromkeys(texts)))


def context_free(text: str, *, field: str = "grammar") -> str:
    """Return the grammar written in Lark's syntax (rule `start`), or in GBNF (rule `root`). Raises `BadRequest`."""
    require_small(text, "the grammar", field)
    require_few_repeats(text, field)
    return LLMatcher.grammar_from_lark(as_lark(text, field))


Schema = dict[str, Any] | bool


class SchemaForm(msgspec.Struct, frozen=True, kw_only=True, tag="schema"):
    """JSON values that fit a schema."""

    schema: Schema
    whitespace_pattern: str | None = None
    spaces_field: str = ""
    """Place of the pattern in the request, if there is one."""
    is_strict: bool = True
    """False leaves open what cannot be enforced."""

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        return json_schema(self.schema, whitespace_pattern=self.whitespace_pattern, field=field)


class TextForm(msgspec.Struct, frozen=True, tag="text"):
    """A regular expression, or a grammar in Lark's syntax or in GBNF."""

    kind: Literal["regex", "grammar"]
    text: str

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        make = regex if self.kind == "regex" else context_free
        return make(self.text, field=field)


class ChoiceForm(msgspec.Struct, frozen=True, tag="choice"):
    """One of a few texts."""

    texts: list[str]

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        return choice(self.texts, field=field)


class TagForm(msgspec.Struct, frozen=True, tag="tag"):
    """A structural tag."""

    tag: dict[str, Any]

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        return structural_tag(self.tag, field=field)


class CallsForm(msgspec.Struct, frozen=True, kw_only=True, tag="calls"):
    """Calls of tools that have to be made, or that the model chooses to make; see `fd_core.structured.calls`."""

    calls: list[CallAsked]
    control_tokens: dict[str, int]
    is_demanded: bool
    before: Sequence[FreePart] = ()
    markers: Sequence[str] = ()
    answer_begin: str = ""
    several: bool = False
    space: bool = False
    instead: FormAsked | None = None
    """A form that an answer without calls has."""

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        before, markers, begin = self.before, self.markers, self.answer_begin
        if not self.is_demanded:
            return chosen_calls(self.calls, self.control_tokens, before=before, markers=markers, answer_begin=begin)
        other = None if self.instead is None else (self.instead.grammar(), self.instead.field)
        return demanded_calls(
            self.calls,
            self.control_tokens,
            several=self.several,
            space=self.space,
            before=before,
            markers=markers,
            instead=other,
            answer_begin=begin if other else "",
        )


Form = SchemaForm | TextForm | ChoiceForm | TagForm | CallsForm


class FormAsked(msgspec.Struct, frozen=True):
    """A form, and the field of the request that asks for it."""

    field: str
    form: Form

    def grammar(self) -> str:
        """Return the grammar, which nobody has compiled yet. Raises `BadRequest` that names the place."""
        return self.form.grammar(self.field)
