"""Parts of a kit: what one check varies, its cases, and a failure reduced to the values that matter."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, TypeVar

from fd_core.ops.contract import Ops
from fd_core.testing.axes.covering import (
    Allowed,
    Axis,
    Case,
    Value,
    case_text,
    count_until_every_value,
    covering_cases,
    default_case,
    parse_case,
    smallest,
)

Subject = TypeVar("Subject")
_SECONDS_TO_REDUCE: Final = 20.0
"""Time after which a failing case is reported as far as it was reduced."""


@dataclass(frozen=True, slots=True, eq=False)
class Part(Generic[Subject]):
    """One check of a kit, with the axes of its cases."""

    name: str
    axes: tuple[Axis, ...]
    check: Callable[[Subject, Case], None]
    """Checks a plugin in one case; any exception is a failure."""
    allowed: Allowed = lambda _: True
    """Returns False for a case that cannot exist or would take too long."""

    def case(self, text: str) -> KitCase:
        """Return the case that `KitCase.text` names. Raises `ConfigError`."""
        return KitCase(self, parse_case(text, self.axes))


@dataclass(frozen=True, slots=True)
class KitCase:
    """One case of a part."""

    part: Part[Any]
    values: Case

    @property
    def text(self) -> str:
        """The values that are not the plainest, as in `rows=65,window=none`."""
        return case_text(self.values, self.part.axes)

    def with_only(self, supported: Callable[[Axis, Value], bool]) -> KitCase:
        """Return the case with the plainest value in place of each one that a plugin does not support."""
        plain = default_case(self.part.axes)
        values = {axis.name: self.values[axis.name] for axis in self.part.axes}
        for axis in self.part.axes:
            if values[axis.name] != plain[axis.name] and not supported(axis, values[axis.name]):
                values[axis.name] = plain[axis.name]
        return KitCase(self.part, values)

    def __str__(self) -> str:
        return f"{self.part.name}:{self.text}"

    def check(self, subject: Any, command: str) -> None:
        """Check a plugin; raise `AssertionError` with the smallest failing case and `command` to repeat it.

        Only the first failure of a part in a process is reduced, because others usually have the same cause.
        """
        reason = self._failure(subject, self.values)
        if reason is None:
            return
        case = self
        if self.part.name not in _REDUCED:
            _REDUCED.add(self.part.name)
            case, reason = self._reduced(subject, reason)
        reduced = "" if case is self else f" (reduced from {self.text})"
        repeat = f"{command} --case {shlex.quote(str(case))}"
        raise AssertionError(f"{case}: {' '.join(reason.split())}; repeat: {repeat}{reduced}")

    def _reduced(self, subject: Any, reason: str) -> tuple[KitCase, str]:
        deadline = time.monotonic() + _SECONDS_TO_REDUCE
        found = reason

        def fails(case: Case) -> bool:
            nonlocal found
            now = None if time.monotonic() > deadline else self._failure(subject, case)
            found = now or found
            return now is not None

        values = smallest(self.values, self.part.axes, fails, self.part.allowed)
        return (self, reason) if values == self.values else (KitCase(self.part, values), found)

    def _failure(self, subject: Any, case: Case) -> str | None:
        try:
            self.part.check(subject, case)
        except AssertionError as error:
            return str(error).split("\nassert ")[0] or "AssertionError"  # without what pytest appends
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            return f"{type(error).__name__}: {error}"
        return None


_REDUCED: Final[set[str]] = set()


def supported_by(ops: Ops, limits: Collection[str]) -> Callable[[Axis, Value], bool]:
    """Return the argument of `KitCase.with_only` for a pack, and the limits of its backend."""

    def supported(axis: Axis, value: Value) -> bool:
        if axis.name in ("packed", "kv_dtype"):
            return value in (ops.weight_formats if axis.name == "packed" else ops.kv_dtypes)
        return axis.needs not in limits

    return supported


@cache
def cases_of(part: Part[Any], seed: int = 0) -> tuple[Sequence[KitCase], int]:
    """Return the cases of a part, and how many of the first ones have every value; see `covering_cases`."""
    cases = covering_cases(part.axes, seed, part.allowed)
    return [KitCase(part, case) for case in cases], count_until_every_value(part.axes, cases)
