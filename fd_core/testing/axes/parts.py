"""Parts of a kit: what one check varies, its cases, and a failure reduced to the values that matter."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from fd_core.config.envelope import OperatingEnvelope
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
from fd_core.testing.hooks.purity import unchanged_process

if TYPE_CHECKING:
    from fd_core.models.families.spec import DecoderSpec

Subject = TypeVar("Subject")
_SECONDS_TO_REDUCE: Final = 20.0
"""Time after which a failing case is reported as far as it was reduced."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Values with which a part reaches a limit of `OperatingEnvelope`."""

    axis: str
    """Axis whose value is the size."""
    others: Case = field(default_factory=dict)
    """Values of other axes without which the size is not reached."""
    step: int = 1
    """Distance of the largest size that is just inside."""


def sizes_at(edges: Mapping[str, Edge]) -> Callable[[Case], Mapping[str, int]]:
    """Return `Part.sizes` of a part whose axes are the sizes themselves."""
    return lambda case: {name: size for name, edge in edges.items() if isinstance(size := case[edge.axis], int)}


@dataclass(frozen=True, slots=True, eq=False)
class Part(Generic[Subject]):
    """One check of a kit, with the axes of its cases."""

    name: str
    axes: tuple[Axis, ...]
    check: Callable[[Subject, Case], None]
    """Checks a plugin in one case; any exception is a failure."""
    allowed: Allowed = lambda _: True
    """Returns False for a case that cannot exist or would take too long."""
    edges: Mapping[str, Edge] = field(default_factory=dict)
    """Limits of `OperatingEnvelope` that the part tests."""
    sizes: Callable[[Case], Mapping[str, int]] = lambda _: {}
    """Returns the sizes of a case under the names of `edges`."""
    of_model: Callable[[DecoderSpec], Sequence[Case]] | None = None
    """Returns cases with the shapes of a model; by default one with its sizes at the axes of `edges`."""
    mixed: bool = False
    """See `covering_cases`; for parts whose cases are cheap."""
    needs: tuple[str, ...] = ()
    """Abilities of `fd_core.testing.kit.limits` that a backend needs for every case."""
    groups: tuple[tuple[str, ...], ...] = ()
    """See `covering_cases`: axes of values that meet in one computation."""

    def within(self, envelope: OperatingEnvelope) -> Part[Subject]:
        """Return the part without cases beyond an envelope, and with cases at its edge and just inside."""
        return _within(self, envelope)

    def cases_of(self, model: DecoderSpec) -> Sequence[KitCase]:
        """Return cases with the shapes of a model."""
        if self.of_model is not None:
            cases = self.of_model(model)
        else:
            sizes = {name: size for name, size in model.sizes().items() if name in self.edges and size}
            case = {edge.axis: sizes[name] for name, edge in self.edges.items() if name in sizes}
            others = {key: value for name in sizes for key, value in self.edges[name].others.items()}
            cases = [{**others, **case}] if case else []
        return [KitCase(self, {**default_case(self.axes), **case}) for case in cases]

    def case(self, text: str) -> KitCase:
        """Return the case that `KitCase.text` names. Raises `ConfigError`."""
        return KitCase(self, parse_case(text, self.axes))


@dataclass(frozen=True, slots=True)
class KitCase:
    """One case of a part."""

    part: Part[Any]
    values: Case
    seed: int = 0
    """Seed of the covering cases that it is one of."""

    @property
    def text(self) -> str:
        """The values that are not the plainest, as in `rows=65,window=none`."""
        return case_text(self.values, self.part.axes)

    def has(self, text: str) -> bool:
        """Return True if the case has all the values that `text` names; `plain` names those of the plainest case.

        Raises `ConfigError` for an axis or a value that does not exist.
        """
        wanted = parse_case(text, self.part.axes)
        named = wanted if text == "plain" else [value.partition("=")[0] for value in text.split(",")]
        return all(self.values[name] == wanted[name] for name in named)

    def with_only(self, supported: Callable[[Axis, Value], bool]) -> KitCase:
        """Return the case with the plainest value in place of each one that a plugin does not support.

        If a case without these values cannot exist, another axis has its plainest value too, or if necessary all.
        """
        plain = default_case(self.part.axes)
        values = {axis.name: self.values[axis.name] for axis in self.part.axes}
        for axis in self.part.axes:
            if values[axis.name] != plain[axis.name] and not supported(axis, values[axis.name]):
                values[axis.name] = plain[axis.name]
        if self.part.allowed(self.values):  # rare values may take longer
            plainer = ({**values, axis.name: plain[axis.name]} for axis in self.part.axes)
            return replace(self, values=next(filter(self.part.allowed, (values, *plainer)), plain))
        return replace(self, values=values)

    def __str__(self) -> str:
        return f"{self.part.name}:{self.text}"

    def check(self, subject: Any, command: str, option: str = "--case") -> None:
        """Check a plugin; raise `AssertionError` with the smallest failing case and `command` to repeat it.

        `option` is the one by which the command takes a case. Only the first failure of a part in a process is
        reduced, because others usually have the same cause.
        """
        reason = self._failure(subject, self.values)
        if reason is None:
            note_held(self.part.name, self.values)
            return
        case = self
        if self.part.name not in _REDUCED:
            _REDUCED.add(self.part.name)
            case, reason = self._reduced(subject, reason)
        origin = [] if case is self else [f"reduced from {self.text}"]
        origin += [f"seed {self.seed}"] if self.seed else []
        repeat = f"{command} {option} {shlex.quote(str(case))}"
        raise AssertionError(
            f"{case}: {' '.join(reason.split())}; repeat: {repeat}" + (f" ({', '.join(origin)})" if origin else "")
        )

    def _reduced(self, subject: Any, reason: str) -> tuple[KitCase, str]:
        deadline = time.monotonic() + _SECONDS_TO_REDUCE
        found = reason

        def fails(case: Case) -> bool:
            nonlocal found
            now = None if time.monotonic() > deadline else self._failure(subject, case)
            # A failure of another kind may come from what the first one left behind.
            if now is None or _kind_of(reason) not in ("", _kind_of(now)):
                return False
            found = now
            return True

        values = smallest(self.values, self.part.axes, fails, self.part.allowed)
        return (self, reason) if values == self.values else (replace(self, values=values), found)

    def _failure(self, subject: Any, case: Case) -> str | None:
        try:
            with unchanged_process():
                self.part.check(subject, case)
        except AssertionError as error:
            return str(error).split("\nassert ")[0] or "AssertionError"  # without what pytest appends
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            return f"{type(error).__name__}: {error}"
        return None


def _kind_of(reason: str) -> str:
    """Return the words of a reason before its first value, without the invariant; none of an exception."""
    if re.match(r"\w+Error: ", reason):
        return ""
    return re.split(r"[\d'\"\[({<]", re.sub(r"^law [\d.]+: ", "", reason), maxsplit=1)[0]


@cache
def _within(part: Part[Any], envelope: OperatingEnvelope) -> Part[Any]:
    limits = {name: limit for name, limit in envelope.limits().items() if name in part.edges}
    if not limits:
        return part
    axes = {axis.name: axis for axis in part.axes}
    beyond = []
    for name, limit in limits.items():
        edge = part.edges[name]
        axis, near = axes[edge.axis], [size for size in (limit, limit - edge.step) if size > 0]
        numbers = [value for value in axis.values if isinstance(value, int)]
        if limit > max(numbers):
            beyond += [{**edge.others, edge.axis: size} for size in near]
            continue
        inside = [value for value in axis.values if not isinstance(value, int) or value <= limit]
        is_plain_inside = axis.values[0] in inside
        values = dict.fromkeys([*inside, *near] if is_plain_inside else [limit, *inside, *near])
        axes[edge.axis] = replace(axis, values=tuple(values))

    def allowed(case: Case) -> bool:
        return part.allowed(case) and not envelope.exceeded(part.sizes(case))  # others may have no sizes

    plain = default_case(tuple(axes.values()))
    for axis in axes.values():
        rare = [case for case in axis.rare if not envelope.exceeded(part.sizes({**plain, **case}))]
        axes[axis.name] = replace(axis, rare=tuple(rare))
    first = next(iter(axes.values()))
    edges = [case for case in beyond if not envelope.exceeded(part.sizes({**plain, **case}))]
    axes[first.name] = replace(first, rare=(*first.rare, *edges))
    return replace(part, axes=tuple(axes.values()), allowed=allowed)


_REDUCED: Final[set[str]] = set()
_HELD: Final[list[tuple[str, dict[str, Value]]]] = []


def note_held(part: str, values: Case) -> None:
    """Add to what the report of the running test lists: values of a part at which a plugin held."""
    _HELD.append((part, dict(values)))


def take_held() -> list[tuple[str, dict[str, Value]]]:
    """Return parts and values that were noted in this process since the last call."""
    found = list(_HELD)
    _HELD.clear()
    return found


def supported_by(ops: Ops, limits: Collection[str]) -> Callable[[Axis, Value], bool]:
    """Return the argument of `KitCase.with_only` for a pack, and the limits of its backend."""

    def supported(axis: Axis, value: Value) -> bool:
        kept = {"kv_dtype": ops.kv_dtypes, "packed_table": ops.table_formats}
        if axis.name in ("packed", "packed_down", *kept):
            return value in kept.get(axis.name, ops.weight_formats)
        return axis.needs not in limits

    return supported


@cache
def cases_of(part: Part[Any], seed: int = 0) -> tuple[Sequence[KitCase], int]:
    """Return the cases of a part, and how many of the first ones have every value; see `covering_cases`."""
    cases = covering_cases(part.axes, seed, part.allowed, mixed=part.mixed, groups=part.groups)
    return [KitCase(part, case, seed) for case in cases], count_until_every_value(part.axes, cases)
