"""The form that a request asks for, as data: any process can make the grammar of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from fd_core.structured import grammar
from fd_core.structured.calls import CallAsked, chosen_calls, demanded_calls
from fd_core.text.parsing.contract import FreePart

__all__ = ["CallsForm", "ChoiceForm", "Form", "FormAsked", "Schema", "SchemaForm", "TagForm", "TextForm"]

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
        return grammar.json_schema(self.schema, whitespace_pattern=self.whitespace_pattern, field=field)


class TextForm(msgspec.Struct, frozen=True, tag="text"):
    """A regular expression, or a grammar in Lark's syntax or in GBNF."""

    kind: Literal["regex", "grammar"]
    text: str

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        make = grammar.regex if self.kind == "regex" else grammar.context_free
        return make(self.text, field=field)


class ChoiceForm(msgspec.Struct, frozen=True, tag="choice"):
    """One of a few texts."""

    texts: list[str]

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        return grammar.choice(self.texts, field=field)


class TagForm(msgspec.Struct, frozen=True, tag="tag"):
    """A structural tag."""

    tag: dict[str, Any]

    def grammar(self, field: str) -> str:
        """Return the grammar. Raises `BadRequest`."""
        return grammar.structural_tag(self.tag, field=field)


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
