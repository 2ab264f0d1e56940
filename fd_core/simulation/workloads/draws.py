"""Seeded numbers, endless and lazy: generators for each purpose, and distributions of lengths and times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.simulation.workloads.files import number_rows

Floats = npt.NDArray[np.float64]

_CHUNK: Final = 1024
_MASK: Final = 2**64 - 1
_MAX_RANGE: Final = 1 << 20


def stir(numbers: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return seeds that look like chance and are the same for the same numbers, as SplitMix64 stirs them."""
    with np.errstate(over="ignore"):
        mixed = np.atleast_1d(np.asarray(numbers, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        stirred: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return stirred


@dataclass(frozen=True, slots=True)
class Distribution:
    """Numbers at or above 0 and how often each comes."""

    text: str
    """As it was written."""
    mean: float
    draw: Callable[[np.random.Generator, int], Floats] = field(compare=False)
    fixed: float | None = None
    """The number, if there is but one."""


class Draws:
    """Endless iterators of drawn numbers, a generator for each purpose, so that the draws of one never move another's.

    Times are whole microseconds and lengths whole tokens: what a processor's last bit of a logarithm is does not show.
    """

    def __init__(self, seed: int, *path: int) -> None:
        """`path`: of whom, such as the number of a user; such draws come from one generator and in small chunks."""
        self._seed = (seed, *path)
        self.seed = seed
        self._shared = self._make(0) if path else None
        self._chunk = 8 if path else _CHUNK

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the generator for a purpose."""
        return self._shared or self._make(int.from_bytes(purpose.encode()))

    def of(self, seed: int) -> Draws:
        """Return the draws of user number `seed`."""
        return Draws(*self._seed, seed)

    def tokens(self, purpose: str, of: Distribution, most: int) -> Iterator[int]:
        """Yield lengths: whole numbers from 1 to `most`."""
        return self._values(purpose, of, lambda drawn: np.clip(np.rint(drawn), 1, most).astype(np.int64))

    def seconds(self, purpose: str, of: Distribution) -> Iterator[float]:
        """Yield times in seconds."""
        return self._values(purpose, of, lambda drawn: np.rint(drawn * 1e6) / 1e6)

    def seeds(self, purpose: str) -> Iterator[int]:
        """Yield seeds of texts, none twice but by a chance of 2**-64 each."""
        generator = self.generator(purpose)
        return self._chunks(lambda count: generator.integers(0, _MASK, count, np.uint64, endpoint=True))

    def indices(self, purpose: str, cumulative: Floats) -> Iterator[int]:
        """Yield indices into `cumulative`, the chances summed up."""
        if len(cumulative) == 1:
            return itertools.repeat(0)
        generator = self.generator(purpose)
        return self._chunks(lambda count: np.searchsorted(cumulative, generator.random(count), "right"))

    def _values(self, purpose: str, of: Distribution, finish: Callable[[Floats], npt.NDArray[Any]]) -> Iterator[Any]:
        if of.fixed is not None:
            return itertools.repeat(finish(np.array([of.fixed])).tolist()[0])
        generator = self.generator(purpose)
        return self._chunks(lambda count: finish(of.draw(generator, count)))

    def _chunks(self, draw: Callable[[int], npt.NDArray[Any]]) -> Iterator[Any]:
        while True:
            yield from draw(self._chunk).tolist()

    def _make(self, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([*self._seed, purpose])))


def chances(weights: npt.ArrayLike) -> Floats:
    """Return the chances of weighted things, summed up: float64[n], the last one exactly 1."""
    summed = np.cumsum(np.asarray(weights, np.float64))
    summed /= summed[-1]
    summed[-1] = 1.0
    return summed


def distribution(text: str, folder: Path, most: float) -> Distribution:
    """Read a distribution such as `128`, `uniform:100:200` or `lognormal:512:0.8`.

    `folder`: where `file:PATH` begins. Raises `ValueError` with a phrase that says what is wrong with it.
    """
    name, _, rest = text.partition(":")
    if not rest:
        name, rest = "fixed", text
    if name == "file":
        return _from_file(text, folder / rest, most)
    if name not in _FORMS:
        raise ValueError(f"{text!r} is none of {', '.join(f'`{form}`' for form in DISTRIBUTION_FORMS)}")
    wanted, build = _FORMS[name]
    given = rest.split(":")
    if len(given) != len(wanted):
        raise ValueError(f"{text!r} has {len(given)} numbers where `{name}:{':'.join(wanted)}` has {len(wanted)}")
    numbers = [_number(one, label, most) for one, label in zip(given, wanted, strict=True)]
    return build(text, *numbers)


def _number(text: str, label: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{label} is {text!r}, which is not a number") from None
    if not 0 <= value <= most:
        raise ValueError(f"{label} is {text}; it can be 0 to {most:,.10g}")
    return value


def _fixed(text: str, value: float) -> Distribution:
    return Distribution(text, value, lambda _, count: np.full(count, value), value)


def _uniform(text: str, low: float, high: float) -> Distribution:
    _ascending(low, high)
    return Distribution(text, (low + high) / 2, lambda generator, count: generator.uniform(low, high, count))


def _exponential(text: str, mean: float) -> Distribution:
    return Distribution(text, mean, lambda generator, count: mean * generator.standard_exponential(count))


def _lognormal(text: str, median: float, sigma: float) -> Distribution:
    if sigma > 5:
        raise ValueError(f"SIGMA is {sigma:g}; it can be 0 to 5, and 0.5 to 1.5 is usual")
    mean = median * math.exp(sigma**2 / 2)
    return Distribution(text, mean, lambda generator, count: median * np.exp(sigma * generator.standard_normal(count)))


def _zipf(text: str, exponent: float, low: float, high: float) -> Distribution:
    _ascending(low, high)
    if exponent > 10:
        raise ValueError(f"EXPONENT is {exponent:g}; it can be 0 to 10")
    if high - low >= _MAX_RANGE:
        raise ValueError(f"LOW to HIGH are {high - low + 1:,.0f} numbers; {_MAX_RANGE:,} can be")
    values = np.arange(math.ceil(low), math.floor(high) + 1, dtype=np.float64)
    if not len(values):
        raise ValueError(f"there is no whole number from {low:g} to {high:g}")
    return _table(text, values, np.asarray(np.arange(1.0, len(values) + 1) ** -exponent, np.float64))


def _from_file(text: str, path: Path, most: float) -> Distribution:
    values = number_rows(path, 1, most)[:, 0]
    return _table(text, values, np.ones(len(values)))


def _table(text: str, values: Floats, weights: Floats) -> Distribution:
    cumulative = chances(weights)
    mean = float((values * weights).sum() / weights.sum())
    return Distribution(
        text, mean, lambda generator, count: values[np.searchsorted(cumulative, generator.random(count), "right")]
    )


def _ascending(low: float, high: float) -> None:
    if low > high:
        raise ValueError(f"LOW is {low:g}, above HIGH, which is {high:g}")


_FORMS: Final[dict[str, tuple[tuple[str, ...], Callable[..., Distribution]]]] = {
    "fixed": (("NUMBER",), _fixed),
    "uniform": (("LOW", "HIGH"), _uniform),
    "exponential": (("MEAN",), _exponential),
    "lognormal": (("MEDIAN", "SIGMA"), _lognormal),
    "zipf": (("EXPONENT", "LOW", "HIGH"), _zipf),
}
DISTRIBUTION_FORMS: Final = (
    "NUMBER",
    *(f"{name}:{':'.join(labels)}" for name, (labels, _) in _FORMS.items() if name != "fixed"),
    "file:PATH",
)
"""How distributions are written."""
