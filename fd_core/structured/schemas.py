"""Schemas as the compiler has to read them.

It refuses words that ask for nothing: they are left out. It writes other answers than some schemas allow: those are
narrowed to what it writes right, or refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final

from fd_core.errors import BadRequest

_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Words whose object names schemas."""
_DATA: Final = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
"""Words whose value is no schema."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "minContains": (0,),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
_FORMATS: Final = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid", "json-pointer", "regex"),
        "relative-json-pointer",
    )
)
"""Those that JSON Schema defines; others are remarks."""
_LOWEST: Final = ("minimum", "exclusiveMinimum")
_HIGHEST: Final = ("maximum", "exclusiveMaximum")
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_EXACT: Final = 2**53
"""Largest size of whole numbers that the compiler, which computes in float64, writes digit by digit."""
_LARGEST: Final = 2**63 - 2**10
_MAX_OPTIONS: Final = 64
"""Options of a `oneOf` that are compared with each other."""
_MAX_HOPS: Final = 8
_MAX_STEPS: Final = 100_000
"""Pairs of schemas, properties and values of one schema that are compared: about a tenth of a second."""


def compilable(schema: Any, field: str) -> Any:
    """Return a schema that the compiler reads as JSON Schema means it.

    Every value that fits it fits the given one. Raises `BadRequest` that names the place of what cannot be held.
    """
    return {} if schema is True else _read(schema, field, _Options(schema))


def _read(value: Any, place: str, options: _Options) -> Any:
    if isinstance(value, list | tuple):
        return [_read(each, f"{place}[{index}]", options) for index, each in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    _require_right(value, place)
    read: dict[str, Any] = {}
    for name, inner in value.items():
        where = f"{place}.{name}"
        if name in _DATA:
            read[name] = inner
        elif any(inner is each or (inner == each and not isinstance(each, bool)) for each in _NEUTRAL.get(name, ())):
            continue
        elif name in _MAPS and isinstance(inner, Mapping):
            read[name] = {key: _read(each, f"{where}.{key}", options) for key, each in inner.items()}
        elif (name == "format" and isinstance(inner, str) and inner not in _FORMATS) or (
            name == "$schema" and isinstance(inner, str) and "//json-schema.org/draft" not in inner
        ):
            continue
        elif name in _LOWEST + _HIGHEST and _is_number(inner):
            read[name] = _inwards(inner, where, up=name in _LOWEST)
        elif name in _COUNTS and isinstance(inner, float) and inner.is_integer():
            read[name] = int(inner)
        else:
            read[name] = _read(inner, where, options)
    if "oneOf" in read and "anyOf" not in read and options.are_apart(value["oneOf"], f"{place}.oneOf"):
        read["anyOf"] = read.pop("oneOf")  # which the compiler takes whatever the options are
    return read


def _require_right(schema: Mapping[str, Any], place: str) -> None:
    for word in ("const", "enum"):
        if (number := _inexact(schema.get(word))) is not None:
            raise _wrong(f"{place}.{word}", f"{number} has more digits than can be written exactly")
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list | tuple) else 0
    if isinstance(least, int | float) and least > named + 1:
        raise _wrong(
            f"{place}.minProperties",
            f"{least} different names cannot be held; list all but one of them in required, which has {named}",
        )
    for low, high, sign in (("exclusiveMinimum", _HIGHEST, 1), ("exclusiveMaximum", _LOWEST, -1)):
        near: Any = schema.get(low)
        fars = [schema[each] for each in high if _is_number(schema.get(each))]
        whole = _is_number(near) and near == math.floor(near) and sign * near >= 0
        if whole and schema.get("type") != "integer" and any(0 < sign * (far - near) < 1 for far in fars):
            raise _wrong(
                f"{place}.{low}", f"{near} itself cannot be left out where less than 1 lies between the bounds"
            )


def _wrong(place: str, reason: str) -> BadRequest:
    return BadRequest(f"{place}: {reason}", field=place)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _inexact(value: Any) -> int | None:
    """Return a whole number within a value that would be written with other digits, None if there is none."""
    if type(value) is int:
        return value if abs(value) > _EXACT else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for each in inner if (found := _inexact(each)) is not None), None)


def _inwards(bound: float, place: str, *, up: bool) -> float:
    """Return the nearest bound that the compiler holds and that keeps the given one: it computes in float64 and int64.

    Bounds beyond would end the process.
    """
    if abs(bound) > _LARGEST:
        if (bound > 0) == up:
            raise _wrong(place, f"beyond this bound no number can be written; {_LARGEST} is the largest")
        return -_LARGEST if up else _LARGEST
    if isinstance(bound, float):
        return bound
    near = float(bound)
    if (near < bound) if up else (near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)


class _Options:
    """Tells the options of every `oneOf` of one schema apart, within a budget of steps."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = _MAX_STEPS
        self._apart_at: dict[tuple[int, int], int] = {}
        """Pairs that were compared, by identity, with the depth at which they were not found apart; -1 if they were."""

    def are_apart(self, options: Any, place: str) -> bool:
        """Return True if no value can fit two of the options, as far as that can be seen.

        Raises `BadRequest` where too many steps are needed.
        """
        if not isinstance(options, list | tuple):
            return False
        found = [self._resolved(each) for each in options]
        try:
            finite = [self._values(each) for each in found]
            if all(each is not None for each in finite):
                return len(set().union(*(each or () for each in finite))) == sum(len(each or ()) for each in finite)
            return len(found) <= _MAX_OPTIONS and all(self._apart(*pair, _MAX_HOPS) for pair in combinations(found, 2))
        except _TooManySteps:
            raise _wrong(
                place,
                f"its options take more than {_MAX_STEPS:,} steps to tell apart; give each a required property with "
                "another const, or use anyOf",
            ) from None

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise _TooManySteps

    def _apart(self, one: Any, other: Any, depth: int) -> bool:
        if not depth or not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        pair = (id(one), id(other)) if id(one) < id(other) else (id(other), id(one))
        known = self._apart_at.get(pair, 0)
        if known < 0 or known >= depth:
            return known < 0
        self._spend(1)
        self._apart_at[pair] = depth  # for a pair within itself: what it would need to be apart, it does not have
        if self._differ(one, other, depth):
            self._apart_at[pair] = -1
            return True
        return False

    def _differ(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        values = self._values(one), self._values(other)
        if values[0] is not None and values[1] is not None:
            return not values[0] & values[1]
        types = _types(one), _types(other)
        if types[0] and types[1] and not types[0] & types[1]:
            return True
        return any(self._kept_apart(*pair, depth - 1) for pair in ((one, other), (other, one)))

    def _kept_apart(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Return True if a property that every object of `one` has never fits `other`."""
        mine, theirs, required = one.get("properties"), other.get("properties"), one.get("required")
        if _types(one) != {"object"} or not isinstance(required, list | tuple):
            return False
        if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
            return False
        self._spend(len(mine) + len(required))
        needed = {name for name in required if isinstance(name, str)}
        names = [name for name in mine if name in theirs and name in needed]
        return any(self._apart(self._resolved(mine[name]), self._resolved(theirs[name]), depth) for name in names)

    def _values(self, schema: Any) -> set[str] | None:
        """Return all values that may fit as JSON, None if they are not listed."""
        if not isinstance(schema, Mapping):
            return None
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(listed, list | tuple):
            return None
        self._spend(len(listed))
        return {json.dumps(int(each) if isinstance(each, float) and each.is_integer() else each) for each in listed}

    def _resolved(self, schema: Any) -> Any:
        """Follow references within the document; whatever else they are is left to the compiler."""
        for _ in range(_MAX_HOPS):
            target = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(target, str) or not target.startswith("#/"):
                return schema
            self._spend(target.count("/"))
            found = self._root
            for step in target[2:].split("/"):
                found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            schema = found
        return None


class _TooManySteps(Exception):
    """The budget is spent."""


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    names = {given} if isinstance(given, str) else set(map(str, given)) if isinstance(given, list | tuple) else set()
    return names | {"integer"} if "number" in names else names
