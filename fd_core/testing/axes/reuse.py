"""Calls of operations as a runner makes them: the same again, others between, on arrays that it keeps."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from fd_core.ops import contract
from fd_core.ops.contract import Array, Lora, Ops, StepInput
from fd_core.testing.axes.covering import Allowed, Axis, Case
from fd_core.testing.axes.parts import Edge, Part, sizes_at
from fd_core.testing.models.arrays import assert_same, other_values

_Kept = defaultdict[str, deque[Any]]
"""Arrays from the host by the name of their operation, and steps, in order."""
_TRIES: Final = 8
_STREAMS: Final = ("project_residual", "moe_residual", "settle")
"""Operations whose results are the residual stream, which later operations on it may write into."""
_OF_LOGITS: Final = ("logits_of", "logits", "logprobs", "gather_rows")
"""Operations with results in float32 whatever the dtype of activations."""
_UPLOADS: Final = ("from_host", "states_from_host")
_RESULTS: Final = ("Array", "None", "tuple[Array, Array]", "tuple[Array, Array, Array]")
_SIGNATURES: Final = {
    name: inspect.signature(method)
    for name, method in vars(Ops).items()
    if callable(method) and inspect.signature(method).return_annotation in _RESULTS
}
_MAY_WRITE: Final[Mapping[str, Sequence[str]]] = {
    name: re.findall(r"may write into `(\w+)`", " ".join((getattr(Ops, name).__doc__ or "").split()), re.IGNORECASE)
    for name in _SIGNATURES
}
"""Arguments that an operation may modify, as its docstring declares."""
IN_PLACE: Final[Mapping[str, str]] = {
    name: written[0]
    for name, written in _MAY_WRITE.items()
    if written
    and any(
        "rows" in (each.name, *getattr(getattr(contract, str(each.annotation), None), "__dataclass_fields__", ()))
        for each in _SIGNATURES[name].parameters.values()
    )
}
"""The array that an operation may modify in some rows, which it is given, by operation."""
_MAY_SHARE: Final = {name for name in _SIGNATURES if "may share memory" in (getattr(Ops, name).__doc__ or "")}


def operation_part(
    name: str,
    axes: tuple[Axis, ...],
    check: Callable[[Ops, Case], None],
    allowed: Allowed = lambda _: True,
    edges: Mapping[str, Edge] = MappingProxyType({}),
    **others: Any,
) -> Part[Ops]:
    """Return a part with an axis of reuse: with `again`, a case runs with other values of the same shapes first, then
    with each call repeated.

    So it fails for a pack that keeps what it should compute anew, or that computes in memory which is still in use.
    Arrays and steps get the identities of those before, so that a pack fails which recognizes inputs by `id`.
    The axes of `edges` are the sizes themselves, unless `sizes` is among the other fields of the part.
    """

    def check_reuse(ops: Ops, case: Case) -> None:
        if not case["again"]:
            return check(ops, case)
        keeping = _KeepingOps(ops)
        with other_values():
            check(cast(Ops, keeping), case)
        repeating = RepeatingOps(ops, keeping.kept)
        check(cast(Ops, repeating), case)
        return repeating.check_kept()

    every = (*axes, Axis("again", (False, True)))
    return Part(name, every, check_reuse, allowed, edges, **{"sizes": sizes_at(edges), **others})


class RecordingOps:
    """A pack that keeps the arguments of each call of an operation, by their names."""

    def __init__(self, ops: Ops, operation: str) -> None:
        self._ops, self._operation = ops, operation
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return self._call if name == self._operation else found

    def _call(self, *arguments: Any, **named: Any) -> Any:
        given = _SIGNATURES[self._operation].bind(self, *arguments, **named).arguments
        self.calls.append({name: value for name, value in given.items() if name != "self"})
        return getattr(self._ops, self._operation)(*arguments, **named)


class _KeepingOps:
    """A pack that keeps the arrays from the host, and the steps that its operations are given."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.kept: _Kept = defaultdict(deque)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return partial(self._call, name, found) if name in _UPLOADS or name in _SIGNATURES else found

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = call(*arguments, **named)
        if name in _UPLOADS:
            self.kept[name].append(result)
        for value in (*arguments, *named.values()):
            step = value.step if isinstance(value, Lora) else value
            if isinstance(step, StepInput) and not any(step is each for each in self.kept["step"]):
                self.kept["step"].append(step)
        return result


class RepeatingOps:
    """A pack whose operations are called twice, with another call between; both times they return the same bits.

    Arrays keep their values until an operation that may write into them takes them. Arrays from the host and steps take
    the places in memory of those of `former`, in the same order, and so their identities. Raises `AssertionError`.
    """

    def __init__(self, ops: Ops, former: _Kept) -> None:
        self._ops = ops
        self._former = former
        for step in former["step"]:
            for each in fields(step):
                object.__setattr__(step, each.name, None)  # its arrays end before it
        self._kept: dict[int, tuple[str, Array, npt.NDArray[Any]]] = {}
        self._steps: dict[int, tuple[StepInput, StepInput]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if name in _UPLOADS:
            return lambda array: self._keep("an array from the host", self._in_place(name, lambda: found(array.copy())))
        if name not in _SIGNATURES or name.startswith(("prepare_", "tied_", "all_")):
            return found
        return partial(self._call, name, found)

    def check_kept(self) -> None:
        """Compare all arrays that nothing may have modified with their first values."""
        for what, array, right in self._kept.values():
            assert_same(self._values(array), right, f"{what} was modified by a later call")

    def _keep(self, what: str, array: Array) -> Array:
        self._kept[id(array)] = what, array, self._values(array)
        return array

    def _in_place(self, name: str, make: Callable[[], Any]) -> Any:
        """Return an object with the identity of the next former one of `name`, if the allocator allows."""
        if not (former := self._former[name]):
            return make()
        missed: list[Any] = []
        identity = id(former[0])
        former.popleft()
        while id(made := make()) != identity and len(missed) < _TRIES:
            missed.append(made)
        return made

    def _step_of(self, value: Any) -> Any:
        if isinstance(value, Lora):
            return replace(value, step=self._step_of(value.step))
        if not isinstance(value, StepInput):
            return value
        if id(value) not in self._steps:
            self._steps[id(value)] = value, self._in_place("step", lambda: replace(value))
        return self._steps[id(value)][1]

    def _values(self, array: Array) -> npt.NDArray[Any]:
        return np.array(self._ops.to_host(array))

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        arguments = tuple(map(self._step_of, arguments))
        given = _SIGNATURES[name].bind(self, *arguments, **named)
        written = {each: given.arguments[each] for each in _MAY_WRITE[name]}
        is_repeated = name not in _STREAMS and all(id(array) in self._kept for array in written.values())
        spare = {each: self._rows(array) for each, array in written.items()} if is_repeated else {}
        for array in written.values():
            self._kept.pop(id(array), None)
        result = call(*arguments, **named)
        if name in _STREAMS:
            return result
        first = [self._values(each) for each in _results(result)]
        if is_repeated:
            if not written:
                self._apply(call, given, {key: self._rows(array, -1) for key, array in self._rows_in(given)})
                for at, each in enumerate(_results(result)):
                    assert_same(self._values(each), first[at], f"result {at} of {name} after another call of it")
            for at, each in enumerate(_results(self._apply(call, given, spare))):
                assert_same(self._values(each), first[at], f"{name} with the same arguments again: result {at}")
                if not written and name not in _MAY_SHARE:
                    self._overwrite(name, each)
                    for other, found in enumerate(_results(self._apply(call, given, {}))):
                        what = f"result {other} of {name} after its result {at} was overwritten"
                        assert_same(self._values(found), first[other], what)
        for at, each in enumerate(_results(result)):
            self._kept[id(each)] = f"result {at} of {name}", each, first[at]
        return result

    def _overwrite(self, name: str, result: Array) -> None:
        """Write into a result by an operation that may, as into all that shares memory with it; see `check_kept`."""
        values = self._values(result)
        if values.ndim != 2 or not values.size:
            return
        rows = self._ops.from_host(np.arange(len(values), dtype=np.int32))
        if name in _OF_LOGITS and values.dtype == np.float32:
            columns, ones = np.zeros(len(values), np.int32), np.ones(len(values), np.float32)
            self._ops.add_at(result, rows, self._ops.from_host(columns), self._ops.from_host(ones))
        elif values.dtype == np.int32:
            self._ops.write_rows(result, rows, self._ops.from_host(values + 1))
        else:
            self._ops.write_rows(result, rows, self._ops.add(result, result))

    def _rows_in(self, given: inspect.BoundArguments) -> list[tuple[str, Array]]:
        """Return the arguments that are arrays of several rows."""
        known = [(key, self._kept.get(id(array))) for key, array in given.arguments.items()]
        return [(key, kept[1]) for key, kept in known if kept is not None and kept[2].ndim > 1 and len(kept[2]) > 1]

    def _rows(self, array: Array, step: int = 1) -> Array:
        """Return a copy of an array, with its rows in reversed order if `step` is -1."""
        count = len(self._values(array))
        return self._ops.gather_rows(array, self._ops.from_host(np.arange(count, dtype=np.int32)[::step].copy()))

    def _apply(self, call: Callable[..., Any], given: inspect.BoundArguments, changes: Mapping[str, Array]) -> Any:
        changed = inspect.BoundArguments(given.signature, OrderedDict({**given.arguments, **changes}))
        return call(*changed.args[1:], **changed.kwargs)


def _results(result: Any) -> Sequence[Array]:
    return () if result is None else result if isinstance(result, tuple) else (result,)
