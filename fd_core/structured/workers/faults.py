"""Where the fault of a JSON schema is: the compiler says what it refuses, but not where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

__all__ = ["LISTED", "NAMED", "SINGLE", "faulty_place"]

_CONTRADICTION: Final = "Unsatisfiable schema"
_MAX_TRIES: Final = 64
"""Parts of a schema that are tried; the fault may lie deeper than is found with so many."""
NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE: Final = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")


def faulty_place(schema: Any, reason: str, refusal: Callable[[Any], str | None]) -> tuple[str, str]:
    """Return the path below `schema` of the smallest part that is at fault, "" for all of it, and why that is refused.

    Such a part is refused for the same `reason`, or if that is a contradiction, for another one that it needs.
    `refusal` says why a schema is refused, None if it is not.
    """
    path, tries = "", 0
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, Mapping) and name in schema}
    while True:
        for place, part in _parts(schema):
            if tries == _MAX_TRIES:
                return path, reason
            tries += 1
            found = refusal({**shared, **part} if isinstance(part, Mapping) else part)
            if found is not None and (found == reason or _is_cause(found, reason, schema, place)):
                path, schema, reason = path + place, part, found
                break
        else:
            return path, reason


def _is_cause(found: str, reason: str, schema: Mapping[str, Any], place: str) -> bool:
    """Return True if no value fits the schema because none fits the part at `place`, which it needs."""
    if not (found.startswith(_CONTRADICTION) and reason.startswith(_CONTRADICTION)):
        return False
    name, required = place.removeprefix(".properties."), schema.get("required")
    return name == place or (isinstance(required, list) and name in required)


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
