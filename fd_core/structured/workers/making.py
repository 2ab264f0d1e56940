"""Makes the grammar of a form and compiles it once: what a process of the pool does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from fd_core.errors import BadRequest
from fd_core.structured import grammar
from fd_core.structured.calls import CallAsked
from fd_core.structured.forms import CallsForm, Form, FormAsked, SchemaForm
from fd_core.structured.workers.faults import faulty_place
from fd_core.structured.workers.messages import INVALID, FormOutcome, Unenforced
from fd_core.structured.workers.relaxing import SchemaFault, relaxed

__all__ = ["outcome_of"]

_COMPILE_SECONDS: Final = 0.5
"""Processor time: the engine takes it once more, beside its steps."""
_EXPLAIN_SECONDS: Final = 1.0
"""Processor time after which no further parts are tried."""

Refusal = Callable[[str], str | None]
"""Says why a grammar cannot be compiled, None if it can."""


def outcome_of(asked: FormAsked, refusal: Refusal) -> FormOutcome:
    """Return the grammar of a form, or why there is none."""
    return _Making(refusal).outcome(asked)


class _Making:
    def __init__(self, refusal: Refusal) -> None:
        self._compile = refusal
        self._began = time.thread_time()

    def outcome(self, asked: FormAsked) -> FormOutcome:
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
        """Return a grammar, or why it cannot be made and compiled."""
        try:
            made = asked.grammar()
        except BadRequest as error:
            return "", _of_tool(asked.form, error)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - a schema may have any value in any place
            [place] = [call.place for call in calls] if len(calls := _calls(asked.form)) == 1 else [asked.field]
            why = f"{place}: it cannot be read ({type(error).__name__}); some value in it has the wrong type"
            return "", _of_tool(asked.form, BadRequest(why, field=place))
        began = time.thread_time()
        reason = self._compile(made)
        if reason is not None:
            place, reason = self._explained(asked, reason)
        elif (took := time.thread_time() - began) > _COMPILE_SECONDS:
            place = asked.field
            reason = (
                f"it takes {took:.1f} s of processor time to compile; at most {_COMPILE_SECONDS:g} s are allowed; "
                "make it smaller"
            )
        else:
            return made, None
        return "", _of_tool(asked.form, BadRequest(f"{place}: {reason}", field=place, code=INVALID))

    def _relaxed(self, asked: FormAsked) -> tuple[FormAsked, list[Unenforced]]:
        """Return the form with all open that is not strict and cannot be enforced."""
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
        """Return the place of the smallest part that cannot be compiled, and the reason."""
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
        """Return why a schema cannot be compiled by itself; None if it can, or if there is no time to try."""
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
