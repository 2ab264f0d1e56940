"""Bounds on what people ask for, so that no grammar stops a server: size, nesting, states."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from fd_core.errors import BadRequest
from fd_core.structured.schemas import compilable

MAX_GRAMMAR_BYTES: Final = 128 * 1024
"""Of a schema, a regex, a grammar or all choices together."""
MAX_DEPTH: Final = 64
"""Levels of nested objects and lists in a schema, or of parentheses in a grammar."""
MAX_CHOICES: Final = 4096
MAX_TAGS: Final = 256
MAX_MULTIPLE: Final = 20_000
"""Least common multiple of all `multipleOf` in a schema, without decimal points: it takes as many states."""
MAX_OPTIONAL: Final = 1000
"""Properties of one object that may be left out: compiling takes the square of their number."""
MAX_REPEATS: Final = 50_000
"""Product of nested repetitions in a regular expression."""
_PATTERN_PARTS: Final = re.compile(
    r"\\[pPxu]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d{1,9}),?(\d{0,9})\}|[()]|.", re.DOTALL
)
"""What a regular expression consists of: escapes, classes, repetitions, parentheses and characters."""


def require_schema(schema: Any, field: str) -> Any:
    """Return a schema as the compiler reads it.

    Raises `BadRequest` that names the place, if it is none, goes beyond the bounds or cannot be held.
    """
    if not isinstance(schema, Mapping | bool):
        raise BadRequest(f"{field}: a schema is a JSON object, not {type(schema).__name__}", field=field)
    require_shallow(schema, field)
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{field}: the schema is not JSON: {error}", field=field) from None
    require_small(text, "the schema", field)
    _require_small_multiples(schema, field)
    _require_quick(schema, field)
    return compilable(schema, field)


def require_small(text: str, what: str, field: str) -> None:
    """Raise `BadRequest` for a text that is empty, or longer than a grammar may be."""
    size = len(text.encode("utf-8", "replace"))
    if not size:
        raise BadRequest(f"{field}: {what} is empty", field=field)
    if size > MAX_GRAMMAR_BYTES:
        raise BadRequest(
            f"{field}: {what} takes {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are allowed", field=field
        )


def require_shallow(value: Any, field: str) -> None:
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


def require_few_repeats(pattern: str, field: str) -> None:
    """Raise `BadRequest` for a regular expression, or a grammar, whose nested repetitions multiply beyond the bound."""
    groups, last = [1], 1  # the largest product within each open group, and of what stands before this place
    for part in _PATTERN_PARTS.finditer(pattern):
        if part[0] == "(":
            groups.append(1)
            last = 1
        elif part[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif part[1] is not None:
            last *= max(int(part[1]), int(part[2] or 0), 1)
            groups[-1] = max(groups[-1], last)
            if last > MAX_REPEATS:
                raise BadRequest(
                    f"{field}: its nested repetitions multiply to {last:,}; at most {MAX_REPEATS:,} are allowed",
                    field=field,
                )
        else:
            last = 1


def _require_quick(value: Any, place: str) -> None:
    if isinstance(value, Mapping):
        known, required = value.get("properties"), value.get("required")
        named = {each for each in required if isinstance(each, str)} if isinstance(required, list | tuple) else set()
        if isinstance(known, Mapping) and (optional := len(known.keys() - named)) > MAX_OPTIONAL:
            raise BadRequest(
                f"{place}.properties: {optional:,} of them are not required; at most {MAX_OPTIONAL:,} are allowed",
                field=f"{place}.properties",
            )
        for name, inner in value.items():
            if name == "pattern" and isinstance(inner, str):
                require_few_repeats(inner, f"{place}.pattern")
            elif name == "patternProperties" and isinstance(inner, Mapping):
                for pattern in inner:
                    require_few_repeats(str(pattern), f"{place}.patternProperties")
            _require_quick(inner, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _require_quick(inner, f"{place}[{index}]")


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
