"""Fields for structured output, as named by OpenAI, vLLM, FastDeploy and SGLang, and their conversion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fd_core.http.errors import invalid, required
from fd_core.structured.grammar import (
    ChoiceConstraint,
    GrammarConstraint,
    RequestedConstraint,
    Schema,
    SchemaConstraint,
    TagConstraint,
)
from fd_core.structured.schemas import MAX_CHOICES
from fd_core.types import NumLogprobs

MAX_PROMPT_LOGPROBS: Final = 2**20
"""Log-probabilities of prompts that one answer may hold."""
_ANY_OBJECT: Final = SchemaConstraint(schema={"type": "object"})


def check_prompt_logprobs(top: int | None, tokens: int, field: str) -> None:
    """Raise `ApiError` for too many log-probabilities: the prompt's `tokens` with `top` likely tokens each."""
    if top is not None and tokens * (1 + top) > MAX_PROMPT_LOGPROBS:
        raise invalid(
            f"{field}: {tokens} prompt tokens (choices included) with {1 + top} log-probabilities each are "
            f"{tokens * (1 + top)}; at most {MAX_PROMPT_LOGPROBS} are allowed per response: lower {field}, or send "
            "several requests",
            field,
        )


def check_logprobs(top: int | None, max_tokens: Sequence[int], n: int, context: int) -> None:
    """Raise `ApiError` for too many log-probabilities; one text as long as the `context` is always allowed."""
    if top is None:
        return
    total = sum(max_tokens) * n * (1 + top)
    most = max(MAX_PROMPT_LOGPROBS, (1 + top) * context)
    if total > most:
        raise invalid(
            f"logprobs: {len(max_tokens) * n} texts of up to {max(max_tokens)} tokens with {1 + top} "
            f"log-probabilities each are {total}; at most {most} are allowed per response: lower one of them",
            "logprobs",
        )


Choices = Annotated[list[str], Meta(max_length=MAX_CHOICES)]


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """The schema of `response_format`."""

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    """None allows any JSON object."""
    strict: bool | None = None
    """The answer fits the schema in any case."""


class ResponseFormatField(msgspec.Struct, kw_only=True):
    """Output constraint of an answer."""

    type: str
    """`text`, `json_object`, `json_schema` or `structural_tag`."""
    json_schema: JsonSchemaFormat | None = None
    schema: Schema | None = None
    """With `json_object`, as in llama.cpp's API."""
    structures: list[Any] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's field of this name: one constraint, and the white space of JSON."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    """White space allowed between the parts of JSON; defaults to one space after commas and colons."""
    disable_any_whitespace: bool | None = None
    """White space is fixed in any case, unless a pattern is given."""
    disable_fallback: bool | None = None
    """There is one backend and none to fall back to."""


class StructuredFields(msgspec.Struct, kw_only=True):
    """Fields that completions and chat share; a request may have at most one output constraint."""

    prompt_logprobs: NumLogprobs | None = None
    """Most likely tokens shown for each token of the prompt; 0 shows only the prompt's own. No output constraint."""
    response_format: ResponseFormatField | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    json_schema: Schema | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


_ASKING: Final = tuple(
    name for name in StructuredFields.__struct_fields__ if name not in ("prompt_logprobs", "guided_whitespace_pattern")
)
"""Fields that set an output constraint."""
_asked: Final = attrgetter(*_ASKING)
_NOTHING: Final = (None,) * len(_ASKING)


def requested_constraint(fields: StructuredFields) -> RequestedConstraint | None:
    """Return the output constraint of a request, None for any text; `ApiError` (400) for more than one."""
    if _asked(fields) == _NOTHING:
        return None
    found = [constraint for constraint in _constraints(fields) if constraint is not None]
    if len(found) > 1:
        raise invalid(
            f"{found[0].field} and {found[1].field} are both output constraints; specify only one", found[1].field
        )
    return found[0] if found else None


def _constraints(fields: StructuredFields) -> list[RequestedConstraint | None]:
    outputs = fields.structured_outputs or StructuredOutputs()
    space, other_space = outputs.whitespace_pattern or None, fields.guided_whitespace_pattern or None
    within = "structured_outputs"
    return [
        _response_format(fields.response_format),
        _json(outputs.json, f"{within}.json", space),
        _any_object(outputs.json_object, f"{within}.json_object"),
        _text(outputs.regex, f"{within}.regex", "regex"),
        _choice(outputs.choice, f"{within}.choice"),
        _text(outputs.grammar, f"{within}.grammar", "grammar"),
        _tag(outputs.structural_tag, f"{within}.structural_tag"),
        _json(fields.guided_json, "guided_json", other_space),
        _any_object(fields.guided_json_object, "guided_json_object"),
        _text(fields.guided_regex, "guided_regex", "regex"),
        _choice(fields.guided_choice, "guided_choice"),
        _text(fields.guided_grammar, "guided_grammar", "grammar"),
        _tag(fields.structural_tag, "structural_tag"),
        _json(fields.json_schema, "json_schema", other_space),
        _text(fields.regex, "regex", "regex"),
        _text(fields.ebnf, "ebnf", "grammar"),
        _text(fields.grammar, "grammar", "grammar"),
    ]


def _response_format(wanted: ResponseFormatField | None) -> RequestedConstraint | None:
    if wanted is None or wanted.type == "text":
        return None
    place = "response_format"
    if wanted.type == "json_object":
        if wanted.schema is not None:
            return _json(wanted.schema, f"{place}.schema", None)
        return RequestedConstraint(place, _ANY_OBJECT)
    if wanted.type == "json_schema":
        given = required(wanted.json_schema, f"{place}.json_schema")
        if given.schema is None:
            return RequestedConstraint(place, _ANY_OBJECT)
        return _json(given.schema, f"{place}.json_schema.schema", None, is_strict=given.strict is not False)
    if wanted.type == "structural_tag":
        parts = {"structures": wanted.structures, "triggers": wanted.triggers, "format": wanted.format}
        return _tag({name: value for name, value in parts.items() if value is not None}, place)
    known = "text, json_object, json_schema or structural_tag"
    raise invalid(f"{place}.type is {wanted.type[:40]!r}; expected {known}", f"{place}.type", "invalid_value")


def _json(
    schema: Schema | str | None, field: str, whitespace: str | None, *, is_strict: bool = True
) -> RequestedConstraint | None:
    if schema is None or schema == "":
        return None
    read = _decoded(schema, field) if isinstance(schema, str) else schema
    if not isinstance(read, dict | bool):
        raise invalid(
            f"{field}: expected a JSON schema as an object, got {type(read).__name__}", field, "invalid_value"
        )
    own = f"{field.rpartition('.')[0]}.whitespace_pattern" if "." in field else "guided_whitespace_pattern"
    spaces = own if whitespace else ""
    constraint = SchemaConstraint(schema=read, whitespace_pattern=whitespace, spaces_field=spaces, is_strict=is_strict)
    return RequestedConstraint(field, constraint)


def _any_object(wanted: bool | None, field: str) -> RequestedConstraint | None:
    return RequestedConstraint(field, _ANY_OBJECT) if wanted else None


def _text(text: str | None, field: str, kind: Literal["regex", "grammar"]) -> RequestedConstraint | None:
    return RequestedConstraint(field, GrammarConstraint(kind, text)) if text else None


def _choice(texts: list[str] | None, field: str) -> RequestedConstraint | None:
    return RequestedConstraint(field, ChoiceConstraint(texts)) if texts else None


def _tag(tag: str | dict[str, Any] | None, field: str) -> RequestedConstraint | None:
    if not tag:
        return None
    read = _decoded(tag, field) if isinstance(tag, str) else tag
    if not isinstance(read, dict):
        raise invalid(
            f"{field}: expected a structural tag as an object, got {type(read).__name__}", field, "invalid_value"
        )
    return RequestedConstraint(field, TagConstraint(read))


def _decoded(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{field}: invalid JSON: {str(error)[:200]}", field, "invalid_json") from None
