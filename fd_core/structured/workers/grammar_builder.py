"""Makes the grammar of an output constraint and compiles it once, in a process of the pool."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from fd_core.errors import BadRequest
from fd_core.structured import grammar
from fd_core.structured.grammar import (
    CallsConstraint,
    OutputConstraint,
    RequestedCall,
    RequestedConstraint,
    SchemaConstraint,
)
from fd_core.structured.schemas import NAMED
from fd_core.structured.workers.messages import INVALID, ConstraintOutcome, Unenforced

_CONTRADICTION: Final = "Unsatisfiable schema"
_MAX_TRIES: Final = 64
"""Limit of tested parts of a schema; the faulty part may be nested deeper."""
LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE: Final = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")


def faulty_location(schema: Any, reason: str, refusal: Callable[[Any], str | None]) -> tuple[str, str]:
    """Return the path below `schema` of the smallest faulty part, "" for all of it, and the reason.

    Such a part is rejected for the same `reason`, or if that is a contradiction, for another one that it needs.
    `refusal` returns why a schema is rejected, None if it is not.
    """
    path, tries = "", 0
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, Mapping) and name in schema}
    while True:
        for location, part in _parts(schema):
            if tries == _MAX_TRIES:
                return path, reason
            tries += 1
            found = refusal({**shared, **part} if isinstance(part, Mapping) else part)
            if found is not None and (found == reason or _is_cause(found, reason, schema, location=location)):
                path, schema, reason = path + location, part, found
                break
        else:
            return path, reason


def _is_cause(found: str, reason: str, schema: Mapping[str, Any], location: str) -> bool:
    """Return True if no value fits the schema because none fits the part at `location`, which it needs."""
    if not (found.startswith(_CONTRADICTION) and reason.startswith(_CONTRADICTION)):
        return False
    name, required = location.removeprefix(".properties."), schema.get("required")
    return name == location or (isinstance(required, list) and name in required)


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
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


_MAX_PARTS: Final = 64
"""Limit of parts of a schema that are relaxed one by one; beyond it, the whole schema is."""
_LAST: Final = ("required", "enum", "const", "items", "anyOf", "$ref", "properties", "type")
"""Keywords to remove last, in this order, the most important at the end."""


class SchemaFault(NamedTuple):
    """A part of a schema that cannot be enforced."""

    location: str
    reason: str


def relaxed(
    schema: Any,
    location: str,
    anything: Any,
    fault_of: Callable[[Any], SchemaFault | None],
    is_late: Callable[[], bool],
) -> tuple[Any, list[Unenforced]]:
    """Return a schema without unenforceable parts, and these parts. Every value of the given schema matches it.

    `fault_of` returns the first part that cannot be, None if all can. If there are too many such parts, or finding them
    takes too long, `anything` replaces the schema.
    """
    fault = fault_of(schema)
    schema = copy.deepcopy(schema)
    warnings: list[Unenforced] = []
    for _ in range(_MAX_PARTS):
        if fault is None:
            return schema, warnings
        where, after = _leave_out(schema, location, fault, fault_of=fault_of, is_late=is_late)
        warnings.append(Unenforced(where, f"not enforced: {fault.reason}"))
        if where == location or is_late():
            break
        fault = after
    return anything, [Unenforced(location, warnings[0].message if warnings else "not enforced")]


def _leave_out(
    schema: Any,
    root: str,
    fault: SchemaFault,
    fault_of: Callable[[Any], SchemaFault | None],
    is_late: Callable[[], bool],
) -> tuple[str, SchemaFault | None]:
    """Remove the faulty part of a schema; return its location, `root` for the whole schema, and the next fault."""
    parent, key, outer = None, None, "schema"
    node, kind, location = schema, "schema", root
    while kind != "value" and (step := _step(node, location, fault.location)) is not None:
        parent, outer = node, kind
        key, node, location = step
        kind = _kind(outer, key)
    if kind == "schema" and isinstance(node, dict):
        for holder, word, where in _removable(node, location):
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
    return location, fault_of(schema)


def _removable(node: dict[str, Any], location: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield removable parts of a schema, the least important first: the parent, the key and the location."""
    for word in sorted(node, key=lambda each: _LAST.index(each) if each in _LAST else -1):
        inner = node[word]
        if word in NAMED and isinstance(inner, dict):
            yield from ((inner, name, f"{location}.{word}.{name}") for name in [*inner])
        yield node, word, f"{location}.{word}"


def _step(node: Any, location: str, target: str) -> tuple[Any, Any, str] | None:
    """Return the key, the value and the place of the part of `node` that holds the target; None if none does."""
    if isinstance(node, Mapping):
        parts = [(key, value, f"{location}.{key}") for key, value in node.items()]
    elif isinstance(node, list):
        parts = [(index, value, f"{location}[{index}]") for index, value in enumerate(node)]
    else:
        return None
    holding = [part for part in parts if target == part[2] or target.startswith((part[2] + ".", part[2] + "["))]
    return max(holding, key=lambda part: len(part[2]), default=None)


def _kind(kind: str, key: Any) -> str:
    """Return the kind of the value at a key of a schema, or of a map or list of schemas."""
    if kind == "schemas":
        return "schema"
    if key in SINGLE:
        return "schema"
    return "schemas" if key in NAMED or key in LISTED else "value"


_COMPILE_SECONDS: Final = 0.5
"""Limit of the CPU time of a compilation, which the engine repeats alongside its steps."""
_EXPLAIN_SECONDS: Final = 1.0
"""CPU time after which no further parts are tested."""


class GrammarBuilder:
    """Makes one grammar, within limits of CPU time."""

    def __init__(self, refusal: Callable[[str], str | None]) -> None:
        """`refusal` returns why a grammar cannot be compiled, None if it can."""
        self._compile = refusal
        self._began = time.thread_time()

    def outcome(self, asked: RequestedConstraint) -> ConstraintOutcome:
        """Return the grammar of an output constraint, or the reason why there is none."""
        made, fault = self._made(asked)
        warnings: list[Unenforced] = []
        if fault is not None:
            asked, warnings = self._relaxed(asked)
            if warnings:
                made, fault = self._made(asked)
        if fault is not None:
            return ConstraintOutcome(message=fault.message, field=fault.field, code=fault.code or INVALID)
        return ConstraintOutcome(grammar=made, warnings=tuple(warnings), cpu_seconds=time.thread_time() - self._began)

    def _made(self, asked: RequestedConstraint) -> tuple[str, BadRequest | None]:
        """Return a grammar, or the reason why it cannot be made and compiled."""
        try:
            made = asked.grammar()
        except BadRequest as error:
            return "", _of_tool(asked.constraint, error)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - a schema may have any value anywhere
            [location] = (
                [call.location for call in calls] if len(calls := _calls(asked.constraint)) == 1 else [asked.field]
            )
            why = f"{location}: invalid ({type(error).__name__}): a value has the wrong type"
            return "", _of_tool(asked.constraint, BadRequest(why, field=location))
        began = time.thread_time()
        reason = self._compile(made)
        if reason is not None:
            location, reason = self._explained(asked, reason)
        elif (took := time.thread_time() - began) > _COMPILE_SECONDS:
            location = asked.field
            reason = (
                f"compiling takes {took:.1f} s of CPU time; at most {_COMPILE_SECONDS:g} s are allowed; simplify it"
            )
        else:
            return made, None
        return "", _of_tool(asked.constraint, BadRequest(f"{location}: {reason}", field=location, code=INVALID))

    def _relaxed(self, asked: RequestedConstraint) -> tuple[RequestedConstraint, list[Unenforced]]:
        """Return the output constraint, relaxed where it is not strict and cannot be enforced."""
        constraint, field = asked.constraint, asked.field
        warnings: list[Unenforced] = []
        if isinstance(constraint, SchemaConstraint) and not constraint.is_strict:

            def fault_of_schema(schema: Any) -> SchemaFault | None:
                return self._fault(RequestedConstraint(field, msgspec.structs.replace(constraint, schema=schema)))

            schema, warnings = relaxed(constraint.schema, field, {}, fault_of=fault_of_schema, is_late=self._is_late)
            constraint = msgspec.structs.replace(constraint, schema=schema)
        elif isinstance(constraint, CallsConstraint):
            calls, instead = list(constraint.calls), constraint.instead
            for index, call in enumerate(constraint.calls):
                if not call.is_strict:
                    alone = msgspec.structs.replace(constraint, instead=None)
                    calls[index], more = self._relaxed_call(field, alone, call)
                    warnings += more
            if instead is not None:
                instead, more = self._relaxed(instead)
                warnings += more
            constraint = msgspec.structs.replace(constraint, calls=calls, instead=instead)
        return RequestedConstraint(field, constraint), warnings

    def _relaxed_call(
        self, field: str, constraint: CallsConstraint, call: RequestedCall
    ) -> tuple[RequestedCall, list[Unenforced]]:
        def fault_of(schema: Any) -> SchemaFault | None:
            return self._fault(
                RequestedConstraint(field, msgspec.structs.replace(constraint, calls=[call._replace(schema=schema)]))
            )

        schema, warnings = relaxed(call.schema, call.location, {"type": "object"}, fault_of, self._is_late)
        return call._replace(schema=schema), warnings

    def _fault(self, asked: RequestedConstraint) -> SchemaFault | None:
        _, error = self._made(asked)
        return None if error is None else SchemaFault(error.field or asked.field, str(error))

    def _explained(self, asked: RequestedConstraint, reason: str) -> tuple[str, str]:
        """Return the location of the smallest part that cannot be compiled, and the reason."""
        constraint, location = asked.constraint, asked.field
        schema: Any = constraint.schema if isinstance(constraint, SchemaConstraint) else None
        for call in _calls(constraint):
            if refused := self._refusal(call.schema):
                location, schema, reason = call.location, call.schema, refused
                break
        if schema is None:
            return location, reason
        if isinstance(constraint, SchemaConstraint) and constraint.spaces_field and self._refusal(schema) is None:
            return constraint.spaces_field, reason
        path, reason = faulty_location(schema, reason, self._refusal)
        return location + path, reason

    def _refusal(self, schema: Any) -> str | None:
        """Return the reason why a schema by itself does not compile; None if it does, or if no time is left."""
        if self._is_late():
            return None
        with contextlib.suppress(BadRequest):
            return self._compile(grammar.json_schema(schema))
        return None

    def _is_late(self) -> bool:
        return time.thread_time() - self._began > _EXPLAIN_SECONDS


def _calls(constraint: OutputConstraint) -> Sequence[RequestedCall]:
    return constraint.calls if isinstance(constraint, CallsConstraint) else ()


def _of_tool(constraint: OutputConstraint, error: BadRequest) -> BadRequest:
    """Return the error of a part of a form with the name of the tool whose schema it is."""
    for call in _calls(constraint):
        if call.name and error.field is not None and f"{error.field}.".startswith(f"{call.location}."):
            return BadRequest(f"{error} (tool {call.name[:128]!r})", field=error.field, code=error.code)
    return error
