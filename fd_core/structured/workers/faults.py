"""Where the fault of a JSON schema is: the compiler says what it refuses, but not where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

__all__ = ["LISTED", "NAMED", "SINGLE", "faulty_place"]

_MAX_TRIES: Final = 64
"""Parts of a schema that are tried; the fault may lie deeper than is found with so many."""
NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE: Final = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")


def faulty_place(schema: Any, reason: str, refusal: Callable[[Any], str | None]) -> str:
    """Return the path below `schema` of the smallest part that is refused for the same `reason`; "" for all of it.

    `refusal` says why a schema is refused, None if it is not.
    """
    path, tries = "", 0
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, Mapping) and name in schema}
    while True:
        for place, part in _parts(schema):
            if tries == _MAX_TRIES:
                return path
            tries += 1
            if refusal({**shared, **part} if isinstance(part, Mapping) else part) == reason:
                path, schema = path + place, part
                break
        else:
            return path


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas within a schema, with their places in it."""
    if not isinstance(schema, Mapping):
        return
    for keyword in NAMED:
        inner = schema.get(keyword)
        if isinstance(inner, Mapping):
            yield from ((f".{keyword}.{name}", part) for name, part in inner.items())
    for keyword in LISTED:
        inner = schema.get(keyword)
        if isinstance(inner, list):
            yield from ((f".{keyword}[{index}]", part) for index, part in enumerate(inner))
    for keyword in SINGLE:
        if isinstance(schema.get(keyword), Mapping | bool):
            yield f".{keyword}", schema[keyword]
