"""From bursts and replays to the rows of the tables. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

KINDS = {
    "": "answers in one piece",
    "s": "streams",
    "q": "streams to clients that acknowledge every packet at once",
    "r": "streams that arrive at random",
}
"""Requests of a burst, by the letter on the command line."""
RATE = "r"
"""Kind whose number is a rate in requests a second instead of a concurrency."""
DIRECT = "direct"
"""The workers without a router between."""


def load_name(kind: str, number: int) -> str:
    """Return the title of a load."""
    return f"{KINDS[kind]}, {number:,} {'a second' if kind == RATE else 'at a time'}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Cell:
    """One burst of one contender in one round."""

    contender: str
    round: int
    kind: str
    """One of KINDS."""
    concurrency: int
    """Requests at a time; of RATE those a second."""
    p50_s: float
    p99_s: float
    """To the first byte of an answer's body."""
    per_second: float
    cpu_each_s: float

    @property
    def load(self) -> tuple[str, int]:
        """Kind and number of concurrent requests."""
        return self.kind, self.concurrency


@dataclass(frozen=True, slots=True)
class Passing:
    """A contender at one load, medians over rounds; `added` and `share` are against the workers in the same round."""

    contender: str
    kind: str
    """One of KINDS."""
    concurrency: int
    p50_s: float
    added_p50_s: float
    added_p99_s: float
    per_second: float
    share: float
    ratio: float | None
    """Requests/s over those of the first router, in the same round."""
    cpu_each_s: float

    @property
    def load(self) -> tuple[str, int]:
        """Kind and number of concurrent requests."""
        return self.kind, self.concurrency


def passing(cells: Sequence[Cell], reference: str) -> list[Passing]:
    """Summarise bursts, one load after the other: the workers themselves, then routers as they first appear."""
    rounds: dict[tuple[tuple[str, int], str], dict[int, Cell]] = {}
    for cell in cells:
        rounds.setdefault((cell.load, cell.contender), {})[cell.round] = cell
    result = []
    for load in dict.fromkeys(cell.load for cell in cells):
        straight, first = rounds.get((load, DIRECT), {}), rounds.get((load, reference), {})
        for name in dict.fromkeys((DIRECT, *(cell.contender for cell in cells))):
            mine = rounds.get((load, name))
            if not mine:
                continue
            result.append(
                Passing(
                    name,
                    *load,
                    p50_s=median(cell.p50_s for cell in mine.values()),
                    added_p50_s=_inside(mine, straight, lambda a, b: a.p50_s - b.p50_s),
                    added_p99_s=_inside(mine, straight, lambda a, b: a.p99_s - b.p99_s),
                    per_second=median(cell.per_second for cell in mine.values()),
                    share=_inside(mine, straight, lambda a, b: a.per_second / b.per_second),
                    ratio=None if name == DIRECT else _inside(mine, first, lambda a, b: a.per_second / b.per_second),
                    cpu_each_s=median(cell.cpu_each_s for cell in mine.values()),
                )
            )
    return result


def _inside(mine: Mapping[int, Cell], other: Mapping[int, Cell], compare: Callable[[Cell, Cell], float]) -> float:
    """Return the median over the rounds that both have; nan where there is none."""
    return median([compare(cell, other[at]) for at, cell in mine.items() if at in other] or [math.nan])


@dataclass(frozen=True, slots=True)
class Played:
    """All conversations through one contender in one round."""

    contender: str
    round: int
    users: int
    first_s: tuple[float, ...]
    wall_s: float
    cpu_s: float
    workers: tuple[Mapping[str, int], ...]
    """Cache counters of each worker."""

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that workers had in their caches."""
        return sum(each["cached_tokens"] for each in self.workers) / self._prompt

    @property
    def imbalance(self) -> float:
        """The most prompt tokens that a worker had to compute, over the mean."""
        computed = [each["prompt_tokens"] - each["cached_tokens"] for each in self.workers]
        return max(computed) * len(computed) / sum(computed)

    @property
    def _prompt(self) -> int:
        return sum(each["prompt_tokens"] for each in self.workers)


@dataclass(frozen=True, slots=True)
class Conversing:
    """A contender's replays at one number of users, medians over rounds."""

    contender: str
    users: int
    rounds: int
    hit_rate: float
    hit_range: tuple[float, float]
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_mean_s: float
    imbalance: float
    wall_s: float
    cpu_each_s: float


def conversing(played: Sequence[Played]) -> list[Conversing]:
    """Summarise replays, one number of users after the other, contenders in the order of their first appearance."""
    groups: dict[tuple[int, str], list[Played]] = {}
    for one in played:
        groups.setdefault((one.users, one.contender), []).append(one)
    result = []
    for users in dict.fromkeys(one.users for one in played):
        for name in dict.fromkeys(one.contender for one in played):
            mine = groups.get((users, name))
            if not mine:
                continue
            hits = [one.hit_rate for one in mine]
            result.append(
                Conversing(
                    name,
                    users,
                    len(mine),
                    hit_rate=median(hits),
                    hit_range=(min(hits), max(hits)),
                    ttft_p50_s=median(percentile(one.first_s, 0.5) for one in mine),
                    ttft_p95_s=median(percentile(one.first_s, 0.95) for one in mine),
                    ttft_mean_s=median(sum(one.first_s) / len(one.first_s) for one in mine),
                    imbalance=median(one.imbalance for one in mine),
                    wall_s=median(one.wall_s for one in mine),
                    cpu_each_s=median(one.cpu_s / len(one.first_s) for one in mine),
                )
            )
    return result
