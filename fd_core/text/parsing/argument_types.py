"""Arguments that are written as bare text: their JSON value, by the schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

KINDS: Final = frozenset({"string", "number", "boolean", "null", "array", "object"})
"""Types of JSON; integers are numbers."""
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_MAX_PARTS: Final = 256
"""Parts of a schema that are searched for a type; beyond them any type is assumed."""


def parameter_schema(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of one argument within that of all; {} if there is none."""
    schema = referred(schema, schema)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    more = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
    return more if isinstance(more, Mapping) else {}


def referred(schema: Any, root: Any) -> Any:
    """Return the schema that a `$ref` within `root` refers to, `schema` if it has none; {} if it is dangling."""
    for _ in range(_MAX_PARTS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        path = unquote(schema["$ref"]).split("/")
        schema = root if path.pop(0) == "#" else {}
        for step in path:
            step = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(step, {}) if isinstance(schema, Mapping) else {}
    return {}


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that values of a schema, which is part of `root`, can have."""
    return _kinds_of(schema, root, iter(range(_MAX_PARTS)))


def _kinds_of(schema: Any, root: Any, budget: Iterator[int]) -> frozenset[str]:
    part = referred(schema, root)
    if next(budget, None) is None or not isinstance(part, Mapping):
        return KINDS
    named, values = part.get("type"), [part["const"]] if "const" in part else part.get("enum")
    choices = [part[word] for word in ("anyOf", "oneOf") if isinstance(part.get(word), list) and part[word]]
    found = KINDS
    if named is not None:
        names = named if isinstance(named, list) else [named]
        found = frozenset("number" if name == "integer" else str(name) for name in names)
    elif isinstance(values, list):
        found = frozenset(map(kind_of, values))
    elif choices:
        found = frozenset().union(*(_kinds_of(each, root, budget) for each in choices[0]))
    wanted = part.get("allOf")
    for each in wanted if isinstance(wanted, list) else ():
        found &= _kinds_of(each, root, budget)
    return found


def kind_of(value: object) -> str:
    """Return the type of a value of JSON."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, Sequence) else "object"


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a value that was written as `text`: parsed as JSON if `kinds` allow that, else a string."""
    plain = text.strip(" \t\r\n")
    plain = _WORDS.get(plain, plain)
    try:
        kind = kind_of(json.loads(plain, parse_int=float, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if kind in kinds or "string" not in kinds:
        return plain
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
