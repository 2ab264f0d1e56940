"""Bounds on what people ask for, so that no grammar stops a server: size, nesting, states."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from fd_core.errors import BadRequest
from fd_core.structured.schemas import compilable

__all__ = [
    "MAX_CHOICES",
    "MAX_DEPTH",
    "MAX_GRAMMAR_BYTES",
    "MAX_TAGS",
    "require_schema",
    "require_shallow",
    "require_small",
]

MAX_GRAMMAR_BYTES: Final = 128 * 1024
"""Of a schema, a regex, a grammar or all choices together."""
MAX_DEPTH: Final = 64
"""Levels of nested objects and lists in a schema, or of parentheses in a grammar."""
MAX_CHOICES: Final = 4096
MAX_TAGS: Final = 256
MAX_MULTIPLE: Final = 100_000
"""Least common multiple of all `multipleOf` in a schema, without decimal points: it takes as many states."""


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
