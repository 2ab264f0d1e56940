"""From what people ask for to the text of a grammar, `SamplingParams.grammar`, with bounds on size and nesting.

Nothing is compiled here: `fd_core.structured.compiler` says whether a grammar makes sense.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from fd_core.errors import BadRequest

__all__ = [
    *("MAX_CHOICES", "MAX_DEPTH", "MAX_GRAMMAR_BYTES", "choice", "context_free", "json_object", "json_schema"),
    *("regex", "structural_tag"),
]

MAX_GRAMMAR_BYTES: Final = 128 * 1024
"""Of a schema, a regex, a grammar or all choices together."""
MAX_DEPTH: Final = 64
"""Levels of nested objects and lists in a schema, or of parentheses in a grammar."""
MAX_CHOICES: Final = 4096
MAX_TAGS: Final = 256
MAX_MULTIPLE: Final = 100_000
"""Least common multiple of all `multipleOf` in a schema, without decimal points: it takes as many states."""

_JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most programs print it on one line. With one way to write white space, most of what a schema demands is
forced; and no model can fill an answer with blanks."""


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
    if not isinstance(schema, Mapping | bool):
        raise BadRequest(f"{field}: a schema is a JSON object, not {type(schema).__name__}", field=field)
    _require_shallow(schema, field)
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{field}: the schema is not JSON: {error}", field=field) from None
    _require_small(text, "the schema", field)
    _require_small_multiples(schema, field)
    style: Any = _JSON_STYLE if whitespace_pattern is None else {"whitespace_pattern": whitespace_pattern}
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=style)
    except ValueError as error:
        raise BadRequest(f"{field}: the schema cannot be used: {error}", field=field) from None


def regex(pattern: str, *, field: str = "regex") -> str:
    """Return the grammar of the texts that a regular expression matches as a whole. Raises `BadRequest`."""
    _require_small(pattern, "the regular expression", field)
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str], *, field: str = "choice") -> str:
    """Return the grammar of a few given texts. Raises `BadRequest` if there are none, too many or too long ones."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise BadRequest(f"{field}: there are {len(texts)} choices; allowed are 1 to {MAX_CHOICES}", field=field)
    _require_small("".join(texts), "all choices together", field)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(_quoted(text) for text in dict.fromkeys(texts)))


def context_free(text: str, *, field: str = "grammar") -> str:
    """Return the grammar written in Lark's syntax (rule `start`), or in GBNF (rule `root`). Raises `BadRequest`."""
    _require_small(text, "the grammar", field)
    if "::=" not in text:
        return LLMatcher.grammar_from_lark(text)
    if _nesting(text) > MAX_DEPTH:
        raise BadRequest(f"{field}: parentheses are nested deeper than {MAX_DEPTH} levels", field=field)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the library raises whatever its parser runs into
        raise BadRequest(f"{field}: the GBNF cannot be read: {error or type(error).__name__}", field=field) from None


def structural_tag(tag: Mapping[str, Any], *, field: str = "structural_tag") -> str:
    """Return the grammar of free text in which a trigger begins a part of given form.

    `tag` is `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`, or XGrammar's
    `{"format": {"type": "triggered_tags", "tags": [...], "triggers": [...]}}` with schemas as contents. Raises
    `BadRequest` that names the place.
    """
    if "format" in tag:
        place = f"{field}.format"
        triggered = _mapping(tag["format"], place)
        kind = triggered.get("type")
        if kind != "triggered_tags":
            raise BadRequest(f"{place}.type: only 'triggered_tags' is served, not {str(kind)[:40]!r}", field=place)
        for option in ("at_least_one", "stop_after_first", "excludes"):
            if triggered.get(option):
                raise BadRequest(f"{place}.{option} is not served", field=f"{place}.{option}")
        parts = [
            (f"{place}.tags[{index}]", _unwrapped(each, f"{place}.tags[{index}]"))
            for index, each in enumerate(_sequence(triggered.get("tags"), f"{place}.tags"))
        ]
    else:
        place = field
        triggered = tag
        parts = [
            (f"{field}.structures[{index}]", _mapping(each, f"{field}.structures[{index}]"))
            for index, each in enumerate(_sequence(tag.get("structures"), f"{field}.structures"))
        ]
    triggers = [_text(each, f"{place}.triggers") for each in _sequence(triggered.get("triggers"), f"{place}.triggers")]
    tags = [_tag(part, triggers, where) for where, part in parts]
    text = StructTag.to_grammar(tags, assume_special=False)
    _require_small(text, "the tags together", field)
    return LLMatcher.grammar_from_lark(text)


def _tag(part: Mapping[str, Any], triggers: list[str], place: str) -> StructTag:
    begin, end = _text(part.get("begin"), f"{place}.begin"), part.get("end", "")
    if not isinstance(end, str):
        raise BadRequest(f"{place}.end must be a text", field=f"{place}.end")
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if trigger is None:
        raise BadRequest(f"{place}.begin begins with none of the triggers", field=f"{place}.begin")
    schema = part.get("schema", True)
    if not isinstance(schema, Mapping):
        schema = {}
    _require_shallow(schema, f"{place}.schema")
    return StructTag(trigger=trigger, begin=begin, grammar={**schema, "x-guidance": _JSON_STYLE}, end=end)


def _unwrapped(tag: Any, place: str) -> Mapping[str, Any]:
    """Return XGrammar's `{"begin", "content": {"type": "json_schema", "json_schema"}, "end"}` as a structure."""
    tag = _mapping(tag, place)
    content = _mapping(tag.get("content"), f"{place}.content")
    if content.get("type") != "json_schema":
        raise BadRequest(f"{place}.content.type: only 'json_schema' is served", field=f"{place}.content.type")
    return {"begin": tag.get("begin"), "end": tag.get("end", ""), "schema": content.get("json_schema")}


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRequest(f"{place} must be a JSON object", field=place)
    return value


def _sequence(value: Any, place: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_TAGS:
        raise BadRequest(f"{place} must be a list of 1 to {MAX_TAGS} entries", field=place)
    return value


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{place} must be a text that is not empty", field=place)
    return value


def _quoted(text: str) -> str:
    """Return a literal of Lark's syntax, which escapes as JSON does."""
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _require_small(text: str, what: str, field: str) -> None:
    size = len(text.encode("utf-8", "replace"))
    if not size:
        raise BadRequest(f"{field}: {what} is empty", field=field)
    if size > MAX_GRAMMAR_BYTES:
        raise BadRequest(
            f"{field}: {what} takes {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are allowed", field=field
        )


def _require_shallow(value: Any, field: str) -> None:
    """Raise `BadRequest` for values nested too deeply, without recursion."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise BadRequest(f"{field}: the schema is nested deeper than {MAX_DEPTH} levels", field=field)
        inner: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                inner += each.values()
            elif isinstance(each, list | tuple):
                inner += each
        level, depth = inner, depth + 1


def _require_small_multiples(schema: Any, field: str) -> None:
    common = 1
    for place, value in _multiples(schema, field):
        common = math.lcm(common, int("".join(map(str, Decimal(repr(value)).as_tuple().digits))) or 1)
        if common > MAX_MULTIPLE:
            raise BadRequest(
                f"{place}: multiples of {value} take too many states; the least common multiple of all `multipleOf` "
                f"may be {MAX_MULTIPLE:,}",
                field=place,
            )


def _multiples(value: Any, place: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == "multipleOf" and isinstance(inner, int | float) and math.isfinite(inner):
                yield f"{place}.multipleOf", inner
            yield from _multiples(inner, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _multiples(inner, f"{place}[{index}]")


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest
