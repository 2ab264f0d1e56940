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
from fd_core.structured.grammar import CallAsked, CallsForm, Form, FormAsked, SchemaForm
from fd_core.structured.schemas import NAMED
from fd_core.structured.workers.messages import INVALID, FormOutcome, Unenforced

_CONTRADICTION: Final = "Unsatisfiable schema"
_MAX_TRIES: Final = 64
"""Limit of tested parts of a schema; the faulty part may be nested deeper."""
LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE: Final = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")


def faulty_place(schema: Any, reason: str, refusal: Callable[[Any], str | None]) -> tuple[str, str]:
    """Return the path below `schema` of the smallest faulty part, "" for all of it, and the reason.

    Such a part is rejected for the same `reason`, or if that is a contradiction, for another one that it needs.
    `refusal` returns why a schema is rejected, None if it is not.
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

    place: str
    reason: str


def relaxed(
    schema: Any, place: str, anything: Any, fault_of: Callable[[Any], SchemaFault | None], is_late: Callable[[], bool]
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
    """Remove the faulty part of a schema; return its location, `root` for the whole schema, and the next fault."""
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
    """Yield removable parts of a schema, the least important first: the parent, the key and the location."""
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


class GrammarMaking:
    """Makes one grammar, within limits of CPU time."""

    def __init__(self, refusal: Callable[[str], str | None]) -> None:
        """`refusal` returns why a grammar cannot be compiled, None if it can."""
        self._compile = refusal
        self._began = time.thread_time()

    def outcome(self, asked: FormAsked) -> FormOutcome:
        """Return the grammar of an output constraint, or the reason why there is none."""
        made, fault = self._made(asked)
        warnings: list[Unenforced] = []
        if fault is not None:
            asked, warnings = self._relaxed(asked)
            if warnings:
                made, fault = self._made(asked)
        if fault is not None:
            return FormOutcome(message=fault.message, field=fault.field, code=fault.code or INVALID)
        return FormOutcome(grammar=made, warnings=tuple(warnings), cpu_seconds=time.thread_time() - self._began)

    def _made(self, asked: FormAsked) -> tuple[str, BadRequest | None]:
        """Return a grammar, or the reason why it cannot be made and compiled."""
        try:
            made = asked.grammar()
        except BadRequest as error:
            return "", _of_tool(asked.form, error)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - a schema may have any value anywhere
            [place] = [call.place for call in calls] if len(calls := _calls(asked.form)) == 1 else [asked.field]
            why = f"{place}: invalid ({type(error).__name__}): a value has the wrong type"
            return "", _of_tool(asked.form, BadRequest(why, field=place))
        began = time.thread_time()
        reason = self._compile(made)
        if reason is not None:
            place, reason = self._explained(asked, reason)
        elif (took := time.thread_time() - began) > _COMPILE_SECONDS:
            place = asked.field
            reason = (
                f"compiling takes {took:.1f} s of CPU time; at most {_COMPILE_SECONDS:g} s are allowed; simplify it"
            )
        else:
            return made, None
        return "", _of_tool(asked.form, BadRequest(f"{place}: {reason}", field=place, code=INVALID))

    def _relaxed(self, asked: FormAsked) -> tuple[FormAsked, list[Unenforced]]:
        """Return the output constraint, relaxed where it is not strict and cannot be enforced."""
        form, field = asked.form, asked.field
        warnings: list[Unenforced] = []
        if isinstance(form, SchemaForm) and not form.is_strict:

            def fault_of_schema(schema: Any) -> SchemaFault | None:
                return self._fault(FormAsked(field, msgspec.structs.replace(form, schema=schema)))

            schema, warnings = relaxed(form.schema, field, {}, fault_of_schema, self._is_late)
            form = msgspec.structs.replace(form, schema=schema)
        elif isinstance(form, CallsForm):
            calls, instead = list(form.calls), form.instead
            for index, call in enumerate(form.calls):
                if not call.is_strict:
                    alone = msgspec.structs.replace(form, instead=None)
                    calls[index], more = self._relaxed_call(field, alone, call)
                    warnings += more
            if instead is not None:
                instead, more = self._relaxed(instead)
                warnings += more
            form = msgspec.structs.replace(form, calls=calls, instead=instead)
        return FormAsked(field, form), warnings

    def _relaxed_call(self, field: str, form: CallsForm, call: CallAsked) -> tuple[CallAsked, list[Unenforced]]:
        def fault_of(schema: Any) -> SchemaFault | None:
            return self._fault(FormAsked(field, msgspec.structs.replace(form, calls=[call._replace(schema=schema)])))

        schema, warnings = relaxed(call.schema, call.place, {"type": "object"}, fault_of, self._is_late)
        return call._replace(schema=schema), warnings

    def _fault(self, asked: FormAsked) -> SchemaFault | None:
        _, error = self._made(asked)
        return None if error is None else SchemaFault(error.field or asked.field, str(error))

    def _explained(self, asked: FormAsked, reason: str) -> tuple[str, str]:
        """Return the location of the smallest part that cannot be compiled, and the reason."""
        form, place = asked.form, asked.field
        schema: Any = form.schema if isinstance(form, SchemaForm) else None
        for call in _calls(form):
            if refused := self._refusal(call.schema):
                place, schema, reason = call.place, call.schema, refused
                break
        if schema is None:
            return place, reason
        if isinstance(form, SchemaForm) and form.spaces_field and self._refusal(schema) is None:
            return form.spaces_field, reason
        path, reason = faulty_place(schema, reason, self._refusal)
        return place + path, reason

    def _refusal(self, schema: Any) -> str | None:
        """Return the reason why a schema by itself does not compile; None if it does, or if no time is left."""
        if self._is_late():
            return None
        with contextlib.suppress(BadRequest):
            return self._compile(grammar.json_schema(schema))
        return None

    def _is_late(self) -> bool:
        return time.thread_time() - self._began > _EXPLAIN_SECONDS


def _calls(form: Form) -> Sequence[CallAsked]:
    return form.calls if isinstance(form, CallsForm) else ()


def _of_tool(form: Form, error: BadRequest) -> BadRequest:
    """Return the error of a part of a form with the name of the tool whose schema it is."""
    for call in _calls(form):
        if call.name and error.field is not None and f"{error.field}.".startswith(f"{call.place}."):
            return BadRequest(f"{error} (tool {call.name[:128]!r})", field=error.field, code=error.code)
    return error
