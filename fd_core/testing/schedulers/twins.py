"""Schedulers around the one under test: two that get the same calls, and one whose requests reuse ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from fd_core.effects.operations import Effects, Fetch, Load
from fd_core.errors import FdError
from fd_core.scheduling.contract import RequestActivity, Scheduler, SchedulerSetup
from fd_core.signals import MalformedOutput
from fd_core.testing.hooks.purity import another_world
from fd_core.testing.kit.law import broken
from fd_core.types import Delta, RequestSpec

Make = Callable[[SchedulerSetup], Scheduler]
_GAUGES: Final = ("held", "stats", "phases", "activities")
_HELD: Final = 8
"""Results of earlier calls that must not have changed."""


def twins(make: Make) -> Make:
    """Return a constructor of two schedulers that have to return the same, see `_Twins`."""
    return partial(_Twins, make)  # type: ignore[return-value]  # it has all methods of one of them


def reusing_ids(make: Make) -> Make:
    """Return a constructor of a scheduler that is given the ids of requests that ended for new ones."""
    return partial(_ReusesIds, make)  # type: ignore[return-value]  # it has all methods of the other one


class _Twins:
    """Two schedulers with the same calls, the second one with a clock that stands still and other random numbers."""

    def __init__(self, make: Make, setup: SchedulerSetup) -> None:
        names = ("policy", "victims", "drafts")
        own: dict[str, Any] = {name: deepcopy(getattr(setup, name)) for name in names}
        self._make, self._one = make, make(setup)
        with another_world(7, make):
            self._other = make(replace(setup, clock=lambda: 5.0, **own))
        self._results: deque[tuple[str, object, object]] = deque(maxlen=_HELD)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        return partial(self._both, name) if callable(found) and name not in _GAUGES else found

    def _both(self, name: str, *arguments: object) -> object:
        result = _attempt(getattr(self._one, name), arguments)
        with another_world(7, self._make):
            again = _contents(_attempt(getattr(self._other, name), arguments))
        expected = _contents(result)
        # Messages with whole results take longer to write than all the calls.
        if expected != again:
            broken("8", f"{name} returned {expected}, and that of a second scheduler with the same calls {again}")
        for call, earlier, before in self._results:
            if _contents(earlier) != before:
                broken("8", f"{name} changed what {call} returned: {before} to {earlier}")
        self._results.append((name, result, expected))
        if isinstance(result, Exception):
            raise result
        return result


def _attempt(call: Callable[..., object], arguments: tuple[object, ...]) -> object:
    try:
        return call(*arguments)
    except (FdError, MalformedOutput) as error:
        return error


def _contents(value: object) -> object:
    """Return the values in a result, without the durations of requests, which depend on the clock."""
    if isinstance(value, tuple | list):
        return [_contents(each) for each in value]
    if isinstance(value, Exception):
        return type(value).__name__
    if isinstance(value, Delta):
        value = msgspec.structs.replace(value, phases=None)
    return msgspec.to_builtins(value, enc_hook=np.ndarray.tolist)


class _ReusesIds:
    """Gives each request the id of one that ended, if there is one."""

    def __init__(self, make: Make, setup: SchedulerSetup) -> None:
        self._inner = make(setup)
        self._free: list[str] = []
        self._ids: dict[str, str] = {}
        """Id of each request that has not ended."""
        self._names: dict[str, str] = {}
        """The latest request of each id."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add(self, spec: RequestSpec) -> Effects:
        if spec.request_id in self._ids:
            return self._inner.add(spec)
        own = self._free.pop() if self._free else f"id {len(self._names)}"
        self._ids[spec.request_id], self._names[own] = own, spec.request_id
        return self._named(self._inner.add(msgspec.structs.replace(spec, request_id=own)))

    def abort(self, name: str) -> Delta | None:
        return self._ended(self._inner.abort(self._ids.get(name, name)))

    def plan(self) -> Any:
        plan, effects = self._inner.plan()
        if plan is not None and plan.admissions:
            named = (replace(each, request_id=self._names[each.request_id]) for each in plan.admissions)
            plan = replace(plan, admissions=tuple(named))
        return plan, self._named(effects)

    def commit(self, *arguments: Any) -> Any:
        deltas, effects = self._inner.commit(*arguments)
        return [self._ended(each) for each in deltas], self._named(effects)

    def complete(self, completion: Any) -> Delta | None:
        return self._ended(self._inner.complete(completion))

    def request_ids(self) -> list[str]:
        return [self._names[each] for each in self._inner.request_ids()]

    def phases(self, name: str) -> tuple[float, ...] | None:
        return self._inner.phases(self._ids[name])

    def activities(self) -> dict[str, RequestActivity]:
        return {self._names[own]: each for own, each in self._inner.activities().items()}

    def _ended(self, delta: Delta | None) -> Any:
        if delta is None:
            return None
        own, name = delta.request_id, self._names[delta.request_id]
        if delta.finish_reason is not None and self._ids.pop(name, ""):
            self._free.append(own)
        return msgspec.structs.replace(delta, request_id=name)

    def _named(self, effects: Effects) -> Effects:
        def named(operations: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(
                msgspec.structs.replace(each, request_id=self._names[each.request_id])
                if isinstance(each, Load | Fetch)
                else each
                for each in operations
            )

        return msgspec.structs.replace(effects, operations=named(effects.operations))
