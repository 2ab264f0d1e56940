"""Normalization of JSON schemas for the grammar compiler.

The compiler rejects keywords without effect, so they are removed. It is imprecise for some schemas: those are narrowed
to constraints that it handles exactly, or rejected.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any, Final

from fd_core.errors import BadRequest
from fd_core.structured.patterns import INEXACT_FORMATS, compilable_pattern, format_patterns

NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose object names schemas."""
_DATA: Final = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
"""Keywords whose value is not a schema."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "minContains": (0,),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
_FORMATS: Final = frozenset(
    """
    date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference
    uri-template uuid json-pointer regex relative-json-pointer
    """.split()
)
"""Keywords that JSON Schema defines; others are annotations."""
_LOWEST: Final = ("minimum", "exclusiveMinimum")
_HIGHEST: Final = ("maximum", "exclusiveMaximum")
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_EXACT: Final = 2**53
"""Largest size of whole numbers that the compiler, which computes in float64, writes digit by digit."""
_LARGEST: Final = 2**63 - 2**10
_HELD: Final = 2**53 - 1
"""Largest integer that every reader of JSON holds."""
_MAX_OPTIONS: Final = 64
"""Options of a `oneOf` that are compared with each other."""
_MAX_HOPS: Final = 8
_MAX_STEPS: Final = 100_000
"""Pairs of schemas, properties and values of one schema that are compared: about a tenth of a second."""


def wrong(location: str, reason: str) -> BadRequest:
    """Return the error for the value at `location` of a request."""
    return BadRequest(f"{location}: {reason}", field=location)


def compilable(schema: Any, field: str) -> Any:
    """Return a schema that the compiler interprets as JSON Schema does.

    Every value that matches it matches the given one. Raises `BadRequest` with the location of a part that is
    unsupported.
    """
    return {} if schema is True else _read(schema, field, _Options(schema))


def _read(value: Any, location: str, options: _Options) -> Any:
    if isinstance(value, list | tuple):
        return [_read(each, f"{location}[{index}]", options) for index, each in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    _require_valid(value, location)
    read: dict[str, Any] = {}
    for name, inner in value.items():
        where = f"{location}.{name}"
        if name in _DATA:
            read[name] = inner
        elif any(inner is each or (inner == each and not isinstance(each, bool)) for each in _NEUTRAL.get(name, ())):
            continue
        elif name in NAMED and isinstance(inner, Mapping):
            named = compilable_pattern if name == "patternProperties" else str
            read[name] = {named(key): _read(each, f"{where}.{key}", options) for key, each in inner.items()}
        elif name == "pattern" and isinstance(inner, str):
            read[name] = compilable_pattern(inner)
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
    if _is_unlisted_integer(read):
        _bound(read)
    if "oneOf" in read and "anyOf" not in read and options.are_disjoint(value["oneOf"], f"{location}.oneOf"):
        read["anyOf"] = read.pop("oneOf")  # which the compiler supports with any options
    return read


def with_exact_formats(schema: Any) -> Any:
    """Return a schema of `compilable` with patterns instead of the formats that the compiler interprets otherwise."""
    if isinstance(schema, list):
        return [with_exact_formats(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    read: dict[str, Any] = {}
    for name, inner in schema.items():
        if name in NAMED and isinstance(inner, Mapping):
            read[name] = {key: with_exact_formats(each) for key, each in inner.items()}
        else:
            read[name] = inner if name in _DATA else with_exact_formats(inner)
    wanted = read.get("allOf", [])
    if isinstance(kind := read.get("format"), str) and kind in INEXACT_FORMATS and isinstance(wanted, list):
        read["allOf"] = [*wanted, *({"pattern": each} for each in format_patterns(kind))]
        del read["format"]
    return read


def _is_unlisted_integer(schema: Mapping[str, Any]) -> bool:
    return _types(schema) - {"null"} == {"integer"} and "enum" not in schema and "const" not in schema


def _bound(schema: dict[str, Any]) -> None:
    """Add the bounds that a schema of integers lacks: those of the numbers that every reader of JSON holds (RFC 8259).

    Without one, a model may write digits until the text is cut off.
    """
    for names, others, sign in ((_LOWEST, _HIGHEST, -1), (_HIGHEST, _LOWEST, 1)):
        if not any(name in schema for name in names):
            beyond = any(sign * schema[name] >= _HELD for name in others if _is_number(schema.get(name)))
            schema[names[0]] = sign * (_LARGEST if beyond else _HELD)


def _require_valid(schema: Mapping[str, Any], location: str) -> None:
    for word in ("const", "enum"):
        if (number := _inexact(schema.get(word))) is not None:
            raise wrong(f"{location}.{word}", f"{number} cannot be represented exactly")
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list | tuple) else 0
    if isinstance(least, int | float) and least > named + 1:
        raise wrong(
            f"{location}.minProperties",
            f"a minimum of {least} properties cannot be enforced; list all but one of them in required, which has "
            f"{named}",
        )
    for low, high, sign in (("exclusiveMinimum", _HIGHEST, 1), ("exclusiveMaximum", _LOWEST, -1)):
        near: Any = schema.get(low)
        fars = [schema[each] for each in high if _is_number(schema.get(each))]
        whole = _is_number(near) and near == math.floor(near) and sign * near >= 0
        if whole and schema.get("type") != "integer" and any(0 < sign * (far - near) < 1 for far in fars):
            raise wrong(
                f"{location}.{low}",
                f"the exclusive bound {near} cannot be enforced if the bounds differ by less than 1",
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _inexact(value: Any) -> int | None:
    """Return a whole number within a value that would be written with other digits, None if there is none."""
    if type(value) is int:
        return value if abs(value) > _EXACT else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for each in inner if (found := _inexact(each)) is not None), None)


def _inwards(bound: float, location: str, *, up: bool) -> float:
    """Return the nearest bound that the compiler holds and that keeps the given one: it computes in float64 and int64.

    Bounds beyond would end the process.
    """
    if abs(bound) > _LARGEST:
        if (bound > 0) == up:
            raise wrong(location, f"no number beyond this bound can be represented; the largest is {_LARGEST}")
        return -_LARGEST if up else _LARGEST
    if isinstance(bound, float):
        return bound
    near = float(bound)
    if (near < bound) if up else (near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)


class _Options:
    """Decides if the options of every `oneOf` of one schema are disjoint, within a budget of steps."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = _MAX_STEPS
        self._disjoint_at: dict[tuple[int, int], int] = {}
        """Compared pairs, by identity, with the depth at which they were not found disjoint; -1 if they were."""

    def are_disjoint(self, options: Any, location: str) -> bool:
        """Return True if the options are provably disjoint; `BadRequest` if that takes too many steps."""
        if not isinstance(options, list | tuple):
            return False
        found = [self._resolved(each) for each in options]
        try:
            finite = [self._values(each) for each in found]
            if all(each is not None for each in finite):
                return len(set().union(*(each or () for each in finite))) == sum(len(each or ()) for each in finite)
            return len(found) <= _MAX_OPTIONS and all(
                self._disjoint(*pair, _MAX_HOPS) for pair in combinations(found, 2)
            )
        except _StepLimitExceeded:
            raise wrong(
                location,
                f"proving that its options are disjoint takes more than {_MAX_STEPS:,} steps; give each a required "
                "property with a different const, or use anyOf",
            ) from None

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise _StepLimitExceeded

    def _disjoint(self, one: Any, other: Any, depth: int) -> bool:
        if not depth or not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        pair = (id(one), id(other)) if id(one) < id(other) else (id(other), id(one))
        known = self._disjoint_at.get(pair, 0)
        if known < 0 or known >= depth:
            return known < 0
        self._spend(1)
        self._disjoint_at[pair] = depth  # for a pair that contains itself: then it is not disjoint
        if self._differ(one, other, depth):
            self._disjoint_at[pair] = -1
            return True
        return False

    def _differ(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        values = self._values(one), self._values(other)
        if values[0] is not None and values[1] is not None:
            return not values[0] & values[1]
        types = _types(one), _types(other)
        if types[0] and types[1] and not types[0] & types[1]:
            return True
        return any(self._disjoint_by_property(*pair, depth - 1) for pair in ((one, other), (other, one)))

    def _disjoint_by_property(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Return True if a property that every object of `one` has never fits `other`."""
        mine, theirs, required = one.get("properties"), other.get("properties"), one.get("required")
        if _types(one) != {"object"} or not isinstance(required, list | tuple):
            return False
        if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
            return False
        self._spend(len(mine) + len(required))
        needed = {name for name in required if isinstance(name, str)}
        names = [name for name in mine if name in theirs and name in needed]
        return any(self._disjoint(self._resolved(mine[name]), self._resolved(theirs[name]), depth) for name in names)

    def _values(self, schema: Any) -> set[str] | None:
        """Return all possible values as JSON, None if they are not listed."""
        if not isinstance(schema, Mapping):
            return None
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(listed, list | tuple):
            return None
        self._spend(len(listed))
        return {json.dumps(int(each) if isinstance(each, float) and each.is_integer() else each) for each in listed}

    def _resolved(self, schema: Any) -> Any:
        """Follow references within the document; the compiler handles all others."""
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


class _StepLimitExceeded(Exception):
    """The budget is exhausted."""


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    names = {given} if isinstance(given, str) else set(map(str, given)) if isinstance(given, list | tuple) else set()
    return names | {"integer"} if "number" in names else names


MAX_GRAMMAR_BYTES: Final = 128 * 1024
"""Limit of a schema, a regex, a grammar or all choices together."""
MAX_DEPTH: Final = 64
"""Levels of nested objects and lists in a schema, or of parentheses in a grammar."""
MAX_CHOICES: Final = 4096
MAX_TAGS: Final = 256
MAX_MULTIPLE: Final = 20_000
"""Least common multiple of all `multipleOf` in a schema, without decimal points: it takes as many states."""
MAX_OPTIONAL: Final = 1000
"""Optional properties of one object: compile time is quadratic in their number."""
MAX_REPEATS: Final = 50_000
"""Product of nested repetitions in a regular expression."""
_PATTERN_PARTS: Final = re.compile(
    r"\\[pPxu]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d{1,9}),?(\d{0,9})\}|[()]|.", re.DOTALL
)
"""Elements of a regular expression: escapes, classes, repetitions, parentheses and characters."""


def require_schema(schema: Any, field: str) -> Any:
    """Return a schema for the compiler; `BadRequest` with the location of an invalid or too large part."""
    if not isinstance(schema, Mapping | bool):
        raise wrong(field, f"expected a schema as a JSON object, got {type(schema).__name__}")
    require_shallow(schema, field)
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise wrong(field, f"the schema is not valid JSON: {error}") from None
    require_small(text, "the schema", field)
    _require_small_multiples(schema, field)
    _require_quick(schema, field)
    return compilable(schema, field)


def require_small(text: str, what: str, field: str) -> None:
    """Raise `BadRequest` for a text that is empty, or longer than a grammar may be."""
    size = len(text.encode("utf-8", "replace"))
    if not size:
        raise wrong(field, f"{what} is empty")
    if size > MAX_GRAMMAR_BYTES:
        raise wrong(field, f"{what} has {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are allowed")


def require_shallow(value: Any, field: str) -> None:
    """Raise `BadRequest` for values nested too deeply, without recursion."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise wrong(field, f"the schema is nested deeper than {MAX_DEPTH} levels")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                inner += each.values()
            elif isinstance(each, list | tuple):
                inner += each
        level, depth = inner, depth + 1


def require_few_repeats(pattern: str, field: str) -> None:
    """Raise `BadRequest` for a regular expression, or a grammar, whose nested repetitions multiply beyond the bound."""
    groups, last = [1], 1  # the largest product within each open group, and of the text before this position
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
                raise wrong(field, f"its nested repetitions multiply to {last:,}; at most {MAX_REPEATS:,} are allowed")
        else:
            last = 1


def _require_quick(value: Any, location: str) -> None:
    if isinstance(value, Mapping):
        known, required = value.get("properties"), value.get("required")
        named = {each for each in required if isinstance(each, str)} if isinstance(required, list | tuple) else set()
        if isinstance(known, Mapping) and (optional := len(known.keys() - named)) > MAX_OPTIONAL:
            raise wrong(
                f"{location}.properties", f"{optional:,} properties are optional; at most {MAX_OPTIONAL:,} are allowed"
            )
        for name, inner in value.items():
            if name == "pattern" and isinstance(inner, str):
                require_few_repeats(inner, f"{location}.pattern")
            elif name == "patternProperties" and isinstance(inner, Mapping):
                for pattern in inner:
                    require_few_repeats(str(pattern), f"{location}.patternProperties")
            _require_quick(inner, f"{location}.{name}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _require_quick(inner, f"{location}[{index}]")


def _require_small_multiples(schema: Any, field: str) -> None:
    common = 1
    for location, value in _multiples(schema, field):
        common = math.lcm(common, int("".join(map(str, Decimal(repr(value)).as_tuple().digits))) or 1)
        if common > MAX_MULTIPLE:
            raise wrong(
                location,
                f"multiples of {value} need too many states; the least common multiple of all `multipleOf` is limited "
                f"to {MAX_MULTIPLE:,}",
            )


def _multiples(value: Any, location: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == "multipleOf" and isinstance(inner, int | float) and math.isfinite(inner):
                yield f"{location}.multipleOf", inner
            yield from _multiples(inner, f"{location}.{name}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _multiples(inner, f"{location}[{index}]")
