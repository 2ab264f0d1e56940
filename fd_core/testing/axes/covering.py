"""Cases that cover every pair of values of two axes, and the smallest case that still fails.

A fault that needs two particular settings is met by the first case that has both: pairwise testing, after Cohen et al.,
"The AETG System", IEEE Transactions on Software Engineering 23 (1997).
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fd_core.errors import ConfigError

Value = int | float | str | bool | None
Case = Mapping[str, Value]
"""A value of each axis, by name."""
Allowed = Callable[[Case], bool]


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that a kit varies."""

    name: str
    values: tuple[Value, ...]
    """The first one is the plainest, to which a failing case is reduced."""
    fields: tuple[str, ...] = ()
    """Fields of the contract that the axis varies, such as `Heads.window`."""
    rare: tuple[Case, ...] = ()
    """Cases with expensive values, which are in no pairs; each names only values that are not the plainest."""
    needs: str | None = None
    """Ability of `fd_core.testing.kit.limits` that a backend needs for any value but the plainest."""


def around(*numbers: int) -> tuple[int, ...]:
    """Return each number with those before and after it."""
    return tuple(dict.fromkeys(near for number in numbers for near in (number, number - 1, number + 1)))


def int_of(case: Case, name: str) -> int:
    """Return the value of an axis whose values are integers."""
    value = case[name]
    assert isinstance(value, int), f"{name}={value} is no integer"
    return value


def default_case(axes: Sequence[Axis]) -> Case:
    """Return the plainest case."""
    return {axis.name: axis.values[0] for axis in axes}


def covering_cases(
    axes: Sequence[Axis],
    seed: int,
    allowed: Allowed = lambda _: True,
    *,
    mixed: bool = False,
    groups: Sequence[Collection[str]] = (),
) -> list[Case]:
    """Return cases in which every pair of values of two axes occurs that any allowed case has; `seed` orders them.

    A pair counts as possible if the plainest case with it is allowed. Each case begins with a pair that no earlier case
    has, and takes the value of each other axis that adds the most such pairs. Where several add as many, it takes the
    plainest, or with `mixed` a random one: then many combinations of three values occur as well, and cases cost more.
    The first case is the plainest, and the first cases together have every value; those with rare values are last.
    Before them are the cases that are missing for combinations of three values: of axes of one of the `groups` all, of
    other axes one without their plainest values.
    """
    rng, plain = random.Random(seed), default_case(axes)  # noqa: S311 - reproducible tests
    bits = {(axis.name, value): 1 << index for index, (axis, value) in enumerate(_all_values(axes))}
    alone = {setting: allowed({**plain, **dict([setting])}) for setting in bits}

    def possible(one: _Setting, other: _Setting) -> bool:
        """Return True if the plainest case with a pair is allowed: often it has one other value, as many pairs do."""
        for plainest, left in ((one, other), (other, one)):
            if plainest[1] == plain[plainest[0]]:
                return alone[left]
        return allowed({**plain, **dict((one, other))})

    open_pairs = [pair for pair in _all_pairs(axes) if possible(*pair)]
    rng.shuffle(open_pairs)
    partners = dict.fromkeys(bits, 0)
    for one, other in open_pairs:
        partners[one] |= bits[other]
        partners[other] |= bits[one]
    cases = [plain]
    _close(plain, bits, partners)
    for first in open_pairs:
        if not partners[first[0]] & bits[first[1]]:
            continue
        case, settings = {**plain, **dict(first)}, bits[first[0]] | bits[first[1]]
        for axis in rng.sample(axes, len(axes)):
            name = axis.name
            if name in (first[0][0], first[1][0]):
                continue
            gains = {value: (partners[name, value] & settings).bit_count() for value in axis.values}
            values = rng.sample(axis.values, len(axis.values)) if mixed else axis.values
            for value in sorted(values, key=gains.__getitem__, reverse=True):
                if value == case[name] or allowed({**case, name: value}):
                    case[name] = value
                    settings |= bits[name, value]
                    break
        _close(case, bits, partners)
        cases.append(case)
    triples = dict.fromkeys(_open_triples(axes, cases, allowed, groups))
    rare_cases = [{**plain, **rare} for axis in axes for rare in axis.rare]
    return [*_values_first(cases), *_packed(triples, plain, allowed), *rare_cases]


def _open_triples(
    axes: Sequence[Axis], cases: Sequence[Case], allowed: Allowed, groups: Sequence[Collection[str]]
) -> Iterator[_Triple]:
    """Yield the combinations of three values that some case has to have, and none of `cases` has."""
    plain = default_case(axes)
    having: dict[_Setting, int] = defaultdict(int)
    """Cases with a value, as bits."""
    for index, case in enumerate(cases):
        for setting in case.items():
            having[setting] |= 1 << index
    every = (1 << len(cases)) - 1
    differ = {axis.name: every & ~having[axis.name, axis.values[0]] for axis in axes}
    for three in itertools.combinations(axes, 3):
        in_group = any(all(axis.name in group for axis in three) for group in groups)
        one, two, other = (axis.name for axis in three)
        if not in_group and differ[one] & differ[two] & differ[other]:
            continue
        for values in itertools.product(*(axis.values if in_group else axis.values[1:] for axis in three)):
            triple = (one, values[0]), (two, values[1]), (other, values[2])
            is_open = not having[triple[0]] & having[triple[1]] & having[triple[2]]
            if is_open and allowed({**plain, **dict(triple)}):
                yield triple
                if not in_group:
                    break


def _packed(triples: dict[_Triple, None], plain: Case, allowed: Allowed) -> Iterator[Case]:
    """Yield cases that together have combinations of values: each has those that fit, in their order."""
    while triples:
        case, fixed = dict(plain), dict[str, Value]()
        for triple in triples:
            more = dict(triple)
            if all(fixed.get(name, value) == value for name, value in triple) and allowed({**case, **more}):
                case |= more
                fixed |= more
        for triple in [each for each in triples if all(case[name] == value for name, value in each)]:
            del triples[triple]
        yield case


def count_until_every_value(axes: Sequence[Axis], cases: Sequence[Case]) -> int:
    """Return how many of the first cases together have every value of the axes that any case has, without rare ones."""
    common = {(axis.name, value) for axis, value in _all_values(axes)}
    left = {value for case in cases for value in case.items()} & common
    for count, case in enumerate(cases):
        if not left:
            return count
        left -= set(case.items())
    return len(cases)


def _values_first(cases: Sequence[Case]) -> list[Case]:
    """Reorder cases: after the first one, those that add the most values, then the others."""
    first, *others = cases
    left = {value for case in others for value in case.items()} - set(first.items())
    chosen = [first]
    while left:
        best = max(others, key=lambda case: len(left & set(case.items())))
        others.remove(best)
        chosen.append(best)
        left -= set(best.items())
    return chosen + others


def smallest(
    case: Case, axes: Sequence[Axis], fails: Callable[[Case], bool], allowed: Allowed = lambda _: True
) -> Case:
    """Return a case that fails as `case` does, and passes if one of its values is the plainest of its axis."""
    while True:
        for axis in axes:
            plainer = {**case, axis.name: axis.values[0]}
            if plainer != case and allowed(plainer) and fails(plainer):
                case = plainer
                break
        else:
            return case


def case_text(case: Case, axes: Sequence[Axis]) -> str:
    """Return the values that are not the plainest, as `--case` takes them: `rows=65,window=none`."""
    return (
        ",".join(f"{axis.name}={_text(case[axis.name])}" for axis in axes if case[axis.name] != axis.values[0])
        or "plain"
    )


def parse_case(text: str, axes: Sequence[Axis]) -> Case:
    """Return the case that `case_text` wrote; axes that it does not name are plain. Raises `ConfigError`."""
    case, by_name = dict(default_case(axes)), {axis.name: axis for axis in axes}
    for part in filter(None, text.split(",") if text != "plain" else ()):
        name, _, value = part.partition("=")
        if name not in by_name:
            raise ConfigError(f"{name!r} is not an axis of the kit", field="--case", hint=f"axes: {', '.join(by_name)}")
        rare = [rare[name] for axis in axes for rare in axis.rare if name in rare]
        case[name] = _value(value, by_name[name], rare)
    return case


def _value(text: str, axis: Axis, rare: Sequence[Value]) -> Value:
    for known in (*axis.values, *rare):
        if _text(known) == text:
            return known
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        known_values = ", ".join(map(_text, axis.values))
        raise ConfigError(
            f"{axis.name}={text} is not a value", field="--case", hint=f"values: {known_values}"
        ) from None


def _text(value: Value) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


_Setting = tuple[str, Value]
_Pair = tuple[_Setting, _Setting]
_Triple = tuple[_Setting, _Setting, _Setting]


def _all_pairs(axes: Sequence[Axis]) -> Iterator[_Pair]:
    for first, second in itertools.combinations(axes, 2):
        for one, other in itertools.product(first.values, second.values):
            yield (first.name, one), (second.name, other)


def _all_values(axes: Sequence[Axis]) -> Iterator[tuple[Axis, Value]]:
    return ((axis, value) for axis in axes for value in axis.values)


def _close(case: Case, bits: Mapping[_Setting, int], partners: dict[_Setting, int]) -> None:
    """Remove the pairs that a case has from the bits of the open partners of each setting."""
    held = sum(bits[setting] for setting in case.items())
    for setting in case.items():
        partners[setting] &= ~held
