"""Metrics declared where they are counted: metadata on the fields of a statistics struct, read by one generic walk.

    class SchedulerCounters(msgspec.Struct):
        steps: Annotated[int, counter("steps", "Steps answered.")] = 0

A struct may nest those of other owners, and a property may declare a metric by its return type. Pure: the metrics
endpoint turns what `read_metrics` yields into a format.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from itertools import zip_longest
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

Samples = Sequence[tuple[tuple[str, ...], float]]
"""Values of a metric's labels, in the order of `MetricSpec.label_names`, and the sample's value."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Metric metadata of a field or a property."""

    kind: Literal["counter", "gauge", "state"]
    """A `state` is a gauge for each possible value of the field: 1 at the current one, 0 elsewhere."""
    name: str
    """Without prefix, and without the suffix that a format gives counters."""
    help: str
    label: str | None = None
    """Label that distinguishes the entries of a mapping, the positions of a sequence or the values of a state."""
    values: tuple[str, ...] = ()
    """Values of `label` that always have a sample, so that the first count is seen as growth."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels with one value; several fields may share a name and differ here."""
    vllm: tuple[str, ...] = ()
    """Names of the same metric in vLLM, for dashboards and routers that use these."""
    old: tuple[str, ...] = ()
    """Deprecated names, published alongside `name`; `fd_core.deprecations` lists them."""
    old_label: str | None = None
    """Deprecated name of `label`, published alongside it."""
    only_with: str | None = None
    """Field of the same struct without which, None or empty, the metric has no sample."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of all labels."""
        return (*self.labels, *(name for name in (self.label, self.old_label) if name is not None))

    def samples(self, value: Any) -> Samples:
        """Return the samples of a field that holds `value`; none where it is None, which means not measured."""
        fixed = tuple(self.labels.values())
        if value is None:
            return ()
        if self.kind == "state":
            return [((*fixed, each), float(each == value)) for each in self.values]
        if isinstance(value, Mapping):
            found = {str(key.value if isinstance(key, Enum) else key): count for key, count in value.items()}
            counts, repeat = dict.fromkeys(self.values, 0) | found, 1 if self.old_label is None else 2
            return [((*fixed, *[key] * repeat), float(count)) for key, count in counts.items()]
        if self.label is not None:
            return [((*fixed, str(position)), float(count)) for position, count in enumerate(value)]
        return [(fixed, float(value))]


counter = partial(MetricSpec, "counter")
"""Declares a number that only grows within an epoch; takes the other fields of `MetricSpec`."""
gauge = partial(MetricSpec, "gauge")
"""Declares a current value; takes the other fields of `MetricSpec`."""
state = partial(MetricSpec, "state")
"""Declares which of `values` a field currently has; takes the other fields of `MetricSpec`."""


def read_metrics(stats: Any) -> Iterator[tuple[MetricSpec, Samples]]:
    """Yield every metric that `stats` and the statistics nested in it declare and are not None, with its samples."""
    for name, spec, _ in _members(type(stats)):  # type: ignore[arg-type]  # mypy: type is Hashable
        value = getattr(stats, name)
        if spec is None:
            if value is not None:
                yield from read_metrics(value)
        elif spec.only_with is None or getattr(stats, spec.only_with):
            yield spec, spec.samples(value)


def declared_metrics(stats: type[Any]) -> Iterator[MetricSpec]:
    """Yield every metric that a type and the statistics nested in it declare."""
    for _, spec, nested in _members(stats):  # type: ignore[arg-type]  # mypy: type is Hashable
        if spec is not None:
            yield spec
        elif nested is not None:
            yield from declared_metrics(nested)


snapshot = copy.deepcopy
"""Returns a copy of statistics that later counting does not change."""


def one_more(counts: Mapping[str, int], label: str) -> dict[str, int]:
    """Return counts with one more of `label`; the given ones are unchanged, for other threads that read them."""
    return {**counts, label: counts.get(label, 0) + 1}


def total(parts: Sequence[T]) -> T:
    """Return the sum of statistics of one type, at least one: numbers, entries of mappings and of sequences add up."""
    found: T = _total(parts)
    return found


def _total(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, int | float):
        return sum(parts)
    if isinstance(first, Mapping):
        return {key: sum(part.get(key, 0) for part in parts) for part in parts for key in part}
    if isinstance(first, Sequence):
        return tuple(map(sum, zip_longest(*parts, fillvalue=0)))
    return type(first)(**{name: _total([getattr(part, name) for part in parts]) for name in first.__struct_fields__})


@cache
def _members(stats: Any) -> tuple[tuple[str, MetricSpec | None, type[Any] | None], ...]:
    """Return attributes that declare a metric, and those that nest other statistics, with their type."""
    found: list[tuple[str, MetricSpec | None, type[Any] | None]] = []
    for name, hint in get_type_hints(stats, include_extras=True).items():
        spec = _spec(hint)
        nested = None if spec else _nested(hint)
        if spec is not None or nested is not None:
            found.append((name, spec, nested))
    for name, member in vars(stats).items():
        if isinstance(member, property):
            spec = _spec(get_type_hints(member.fget, include_extras=True)["return"])
            if spec is not None:
                found.append((name, spec, None))
    return tuple(found)


def _spec(hint: Any) -> MetricSpec | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, MetricSpec)), None)


def _nested(hint: Any) -> type[Any] | None:
    """Return the type that a field nests, if it declares metrics: `T` of `T` and of `T | None`."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for option in options:
        if isinstance(option, type) and hasattr(option, "__annotations__") and _members(option):
            return option
    return None
