"""Schemas that are not strict: what cannot be enforced is left open, and reported with its place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from fd_core.structured.workers.faults import LISTED, NAMED, SINGLE
from fd_core.structured.workers.messages import Unenforced

__all__ = ["SchemaFault", "relaxed"]

_MAX_PARTS: Final = 64
"""Parts of a schema that are left open one by one; beyond, all of it is."""
_LAST: Final = ("required", "enum", "const", "items", "anyOf", "$ref", "properties", "type")
"""Keywords that others are left out before, those that say most about a value at the end."""


class SchemaFault(NamedTuple):
    """A part of a schema that cannot be enforced."""

    place: str
    reason: str


def relaxed(
    schema: Any, place: str, anything: Any, fault_of: Callable[[Any], SchemaFault | None], is_late: Callable[[], bool]
) -> tuple[Any, list[Unenforced]]:
    """Return a schema without what cannot be enforced, and what that was. Every value of the given one fits it.

    `fault_of` returns the first part that cannot be, None if all can. Where there are too many such parts, or finding
    them takes too long, `anything` takes the place of the schema.
    """
    fault = fault_of(schema)
    schema = copy.deepcopy(schema)
    warnings: list[Unenforced] = []
    for _ in range(_MAX_PARTS):
        if fault is None:
            return schema, warnings
        where, after = _leave_out(schema, place, fault, fault_of, is_late)
        warnings.append(Unenforced(where, f"not enforced: {fault.reason}"))
        if where == place or is_late():
            break
        fault = after
    return anything, [Unenforced(place, warnings[0].message if warnings else "not enforced")]


def _leave_out(
    schema: Any,
    root: str,
    fault: SchemaFault,
    fault_of: Callable[[Any], SchemaFault | None],
    is_late: Callable[[], bool],
) -> tuple[str, SchemaFault | None]:
    """Take the faulty part out of a schema; return its place, which is `root` if it is all, and the next fault."""
    parent, key, outer = None, None, "schema"
    node, kind, place = schema, "schema", root
    while kind != "value" and (step := _step(node, place, fault.place)) is not None:
        parent, outer = node, kind
        key, node, place = step
        kind = _kind(outer, key)
    if kind == "schema" and isinstance(node, dict):
        for holder, word, where in _removable(node, place):
            if is_late():
                break
            kept = holder[word]
            if holder is node:
                del node[word]
            else:
                holder[word] = {}
            after = fault_of(schema)
            if after != fault:
                return where, after
            holder[word] = kept
    if parent is None:
        return root, None
    if outer == "schema" and kind == "value":
        del parent[key]
    else:
        parent[key] = {}
    return place, fault_of(schema)


def _removable(node: dict[str, Any], place: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield what may be left out of a schema, the least important first: what holds it, its key and its place."""
    for word in sorted(node, key=lambda each: _LAST.index(each) if each in _LAST else -1):
        inner = node[word]
        if word in NAMED and isinstance(inner, dict):
            yield from ((inner, name, f"{place}.{word}.{name}") for name in [*inner])
        yield node, word, f"{place}.{word}"


def _step(node: Any, place: str, target: str) -> tuple[Any, Any, str] | None:
    """Return the key, the value and the place of the part of `node` that holds the target; None if none does."""
    if isinstance(node, Mapping):
        parts = [(key, value, f"{place}.{key}") for key, value in node.items()]
    elif isinstance(node, list):
        parts = [(index, value, f"{place}[{index}]") for index, value in enumerate(node)]
    else:
        return None
    holding = [part for part in parts if target == part[2] or target.startswith((part[2] + ".", part[2] + "["))]
    return max(holding, key=lambda part: len(part[2]), default=None)


def _kind(kind: str, key: Any) -> str:
    """Return what stands at a key of a schema, or of a map or list of schemas."""
    if kind == "schemas":
        return "schema"
    if key in SINGLE:
        return "schema"
    return "schemas" if key in NAMED or key in LISTED else "value"
