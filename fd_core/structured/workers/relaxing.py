"""Schemas that are not strict: what cannot be enforced is left open, and reported with its place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from fd_core.structured.workers.faults import LISTED, NAMED, SINGLE
from fd_core.structured.workers.messages import Unenforced

__all__ = ["Fault", "relaxed"]

_MAX_PARTS: Final = 64
"""Parts of a schema that are left open one by one; beyond, all of it is."""
_LAST: Final = frozenset({"type", "properties", "items", "required", "enum", "const", "$ref", "anyOf"})
"""Keywords that say most about a value, so that others are left out before them."""


class Fault(NamedTuple):
    """A part of a schema that cannot be enforced."""

    place: str
    reason: str


def relaxed(
    schema: Any, place: str, anything: Any, fault_of: Callable[[Any], Fault | None], is_late: Callable[[], bool]
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
    schema: Any, root: str, fault: Fault, fault_of: Callable[[Any], Fault | None], is_late: Callable[[], bool]
) -> tuple[str, Fault | None]:
    """Take the faulty part out of a schema; return its place, which is `root` if it is all, and the next fault."""
    parent, key, outer = None, None, "schema"
    node, kind, place = schema, "schema", root
    while kind != "value" and (step := _step(node, place, fault.place)) is not None:
        parent, outer = node, kind
        key, node, place = step
        kind = _kind(outer, key)
    if kind == "schema" and isinstance(node, dict):
        for word in sorted(node, key=lambda each: each in _LAST):
            if is_late():
                break
            kept = node.pop(word)
            after = fault_of(schema)
            if after != fault:
                return f"{place}.{word}", after
            node[word] = kept
    if parent is None:
        return root, None
    if outer == "schema" and kind == "value":
        del parent[key]
    else:
        parent[key] = {}
    return place, fault_of(schema)


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
