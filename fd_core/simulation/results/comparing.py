"""Compares settings over several seeds: their differences, and if these are more than noise.

The same seed gives every setting the same requests, so settings are compared seed by seed: the differences of a pair
have a mean and a t-interval of 95 %. With one seed there is a difference and no interval.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from fd_core.errors import ConfigError
from fd_core.simulation.clock.waits import WAIT_TITLES, WAITS
from fd_core.simulation.results.summary import LatencyFigures, RunSummary

CONFIDENCE: Final = 0.95


class ComparedFigure(msgspec.Struct, frozen=True):
    """A figure of a run, and which direction is better."""

    name: str
    title: str
    unit: str
    """`s`, `/s`, `share` or empty."""
    more_is_better: bool | None
    """None if neither is."""
    of: Callable[[RunSummary], float | None]
    rare: bool = False
    """True if the figure is omitted when it is 0 in all runs."""


def _latency(measure: str, statistic: str) -> ComparedFigure:
    def of(summary: RunSummary) -> float | None:
        figures: LatencyFigures | None = summary.latencies.get(measure)
        return None if figures is None else float(getattr(figures, statistic))

    upper = {"ttft": "TTFT", "tpot": "TPOT", "gap": "Longest gap", "e2e": "End to end"}[measure]
    return ComparedFigure(f"{measure}_{statistic}", f"{upper} {statistic}", "s", more_is_better=False, of=of)


def _wait(name: str, title: str, *reasons: str) -> ComparedFigure:
    """Return the mean seconds that a completed request waited for some reasons."""

    def of(summary: RunSummary) -> float | None:
        if not summary.waits:
            return None
        return math.fsum(each.before + each.between for each in summary.waits if each.reason in reasons)

    return ComparedFigure(name, title, "s", more_is_better=False, of=of, rare=len(reasons) == 1)


_REASONS: Final = tuple(reason for reason in WAITS if reason != "computing")

FIGURES: Final = {
    each.name: each
    for each in (
        ComparedFigure("goodput", "Goodput", "/s", True, lambda each: each.slo.goodput if each.slo else None),
        ComparedFigure(
            "attainment", "SLO attainment", "share", True, lambda each: each.slo.attainment if each.slo else None
        ),
        ComparedFigure("requests_per_s", "Requests", "/s", more_is_better=True, of=lambda each: each.requests_per_s),
        ComparedFigure("output_tokens_per_s", "Output tokens", "/s", True, lambda each: each.output_tokens_per_s),
        *(_latency("ttft", each) for each in ("mean", "p50", "p99")),
        *(_latency("tpot", each) for each in ("mean", "p50", "p99")),
        _latency("gap", "p99"),
        *(_latency("e2e", each) for each in ("mean", "p50", "p95", "p99")),
        _wait("waiting", "Waiting", *_REASONS),
        *(_wait(f"waiting_{reason}", f"Waiting for {WAIT_TITLES[reason]}", reason) for reason in _REASONS),
        ComparedFigure("completed", "Completed", "", more_is_better=True, of=lambda each: each.completed),
        ComparedFigure("lost", "Not completed", "", False, lambda each: each.requests - each.completed, rare=True),
        ComparedFigure("hit_rate", "Prefix hits", "share", more_is_better=True, of=lambda each: each.hit_rate),
        ComparedFigure("kv_use", "KV use", "share", more_is_better=None, of=lambda each: each.kv_use),
        ComparedFigure("preemptions", "Preemptions", "", more_is_better=False, of=lambda each: each.preemptions),
        ComparedFigure("fairness", "Fairness of speed", "share", True, lambda each: each.fairness_speed),
        ComparedFigure(
            "worker_seconds",
            "Worker-seconds for 1M tokens",
            "",
            more_is_better=False,
            of=lambda each: each.cost.worker_seconds_per_million,
        ),
        ComparedFigure("price", "Price of 1M tokens", "", False, lambda each: each.cost.price_per_million),
    )
}
"""Compared figures by name, in the order of tables. None for a figure that a run does not have."""


USUAL_FIGURES: Final = tuple(
    """
    goodput attainment requests_per_s output_tokens_per_s ttft_p50 ttft_p99 tpot_p99 e2e_p95 lost waiting hit_rate
    preemptions fairness worker_seconds price
    """.split()
)


VERDICTS: Final = ("better", "worse", "different", "noise", "one seed")
"""`different` is for a figure without a better direction; `noise` means that the interval contains 0."""


class SeedInterval(msgspec.Struct, frozen=True):
    """A mean over seeds, and the interval of the true one at the requested confidence."""

    mean: float
    low: float | None
    """None with fewer than two seeds."""
    high: float | None
    seeds: int


class Difference(msgspec.Struct, frozen=True):
    """Difference of a figure between two settings, seed by seed."""

    figure: str
    setting: str
    against: str
    more: SeedInterval
    verdict: str
    """One of `VERDICTS`."""


class SettingsComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of settings."""

    by: str
    """Figure that decides."""
    settings: tuple[str, ...]
    figures: dict[str, dict[str, SeedInterval]]
    """By setting and figure."""
    differences: tuple[Difference, ...]
    """Every setting but the first against the first."""
    best: str | None
    """Setting with the best mean of `by`, over seeds that all have; None if nothing can be compared."""
    lead: tuple[Difference, ...]
    """The best against each other one; their intervals hold simultaneously (Bonferroni, over all pairs)."""
    wins: bool
    """True if the best beats every other one by more than noise, and not by completing fewer requests."""
    words: str


def figure_named(name: str, *, slo: bool = True, price: bool = True) -> ComparedFigure:
    """Return a figure; raises `ConfigError` that lists the figures, or names the option that this one requires."""
    if name not in FIGURES:
        raise ConfigError(f"--by: unknown figure {name!r}: use one of {', '.join(FIGURES)}", field="--by")
    if name in ("goodput", "attainment") and not slo:
        raise ConfigError(f"--by: {name} requires an SLO", field="--by", hint="give --slo")
    if name == "price" and not price:
        raise ConfigError("--by: the price of tokens requires that of a worker", field="--by", hint="give --price")
    return FIGURES[name]


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> SeedInterval:
    """Return the mean of at least one value, and its t-interval if there are two."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return SeedInterval(mean, None, None, seeds=count)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    wide = _t_quantile((1 + confidence) / 2, count - 1) * deviation / math.sqrt(count)
    return SeedInterval(mean, mean - wide, mean + wide, seeds=count)


def compare(runs: Mapping[str, Sequence[RunSummary]], by: ComparedFigure | None = None) -> SettingsComparison:
    """Compare settings by their runs, one for each seed.

    `by` decides which is best; if None, goodput where there is an SLO, else the mean time of whole requests.
    """
    first = next((summary for each in runs.values() for summary in each), None)
    by = by or FIGURES["goodput" if first is not None and first.slo else "e2e_mean"]
    found = {
        setting: {
            name: values
            for name, figure in FIGURES.items()
            if (values := {each.seed: float(value) for each in summaries if (value := figure.of(each)) is not None})
        }
        for setting, summaries in runs.items()
    }
    settings = tuple(runs)
    deciding = {setting: found[setting].get(by.name, {}) for setting in settings}
    common = set.intersection(*(set(values) for values in deciding.values())) if deciding else set()
    best, lead = None, []
    # The best and its lead are decided on the same seeds.
    deciding = {setting: {seed: values[seed] for seed in sorted(common)} for setting, values in deciding.items()}
    if common:
        means = {name: math.fsum(values.values()) for name, values in deciding.items()}
        best = (max if by.more_is_better else min)(settings, key=means.__getitem__)
        others = [setting for setting in settings if setting != best]
        pairs = max(len(settings) * len(others) // 2, 1)
        sure = 1 - (1 - CONFIDENCE) / pairs
        lead = [_difference(by, best, deciding[best], other, deciding[other], sure) for other in others]
    dropper = None
    if best is not None and by.unit == "s":  # dropping requests shortens latencies
        lost = {setting: math.fsum(figures["lost"][seed] for seed in common) for setting, figures in found.items()}
        fewest = min(lost, key=lost.__getitem__)
        dropper = fewest if lost[fewest] < lost[best] else None
    wins = bool(lead) and all(each.verdict == "better" for each in lead) and dropper is None
    against = settings[:1]
    return SettingsComparison(
        by=by.name,
        settings=settings,
        figures={
            setting: {name: interval(list(values.values())) for name, values in figures.items()}
            for setting, figures in found.items()
        },
        differences=tuple(
            _difference(each, setting, found[setting][name], first, found[first][name], CONFIDENCE)
            for first in against
            for setting in settings[1:]
            for name, each in FIGURES.items()
            if set(found[setting].get(name, ())) & set(found[first].get(name, ()))
        ),
        best=best,
        lead=tuple(lead),
        wins=wins,
        words=_words(by, settings, best, lead=lead, wins=wins, dropper=dropper),
    )


def _difference(
    figure: ComparedFigure,
    setting: str,
    own: Mapping[int, float],
    against: str,
    other: Mapping[int, float],
    confidence: float,
) -> Difference:
    more = interval([own[seed] - other[seed] for seed in own if seed in other], confidence)
    if more.low is None or more.high is None:
        verdict = "one seed"
    elif more.low <= 0 <= more.high:
        verdict = "noise"
    elif figure.more_is_better is None:
        verdict = "different"
    else:
        verdict = "better" if (more.low > 0) == figure.more_is_better else "worse"
    return Difference(figure.name, setting, against, more=more, verdict=verdict)


def _words(
    by: ComparedFigure,
    settings: Sequence[str],
    best: str | None,
    lead: Sequence[Difference],
    wins: bool,
    dropper: str | None,
) -> str:
    what = f"{by.title} ({by.name})"
    if best is None:
        return f"No seed has {what} in all settings, so there is no comparison."
    if not lead:
        return f"There is only one setting, {best}, so there is no comparison."
    seeds = min(each.more.seeds for each in lead)
    undecided = [each for each in lead if each.verdict != "better"]
    closest = min(undecided or lead, key=lambda each: abs(each.more.mean))
    if seeds < 2 and closest.more.mean == 0:
        return f"{best} and {closest.against} are equal by {what} with one seed."
    if seeds < 2:
        return f"{best} has the best {what}, with one seed, which may be noise. Use several seeds."
    if dropper is not None:
        return (
            f"No winner by {what}, which is that of completed requests: {best} is ahead, but completes fewer of them "
            f"than {dropper}."
        )
    low, high = closest.more.low or 0.0, closest.more.high or 0.0
    span = f"{closest.more.mean:+.4g} against {closest.against}, {CONFIDENCE:.0%} interval {low:+.4g} to {high:+.4g}"
    if wins:
        beaten = "" if len(settings) == 2 else f" all {len(settings) - 1} others"
        return f"{best} wins{beaten} by {what}: {span}, {seeds} seeds."
    if closest.more.mean == 0 and low == high:
        return f"{best} and {closest.against} are equal by {what} in each of {seeds} seeds."
    noise = ", ".join(each.against for each in undecided)
    return f"No winner by {what}: {best} is ahead of {noise} by no more than noise: {span}, {seeds} seeds."


@functools.cache
def _t_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t for a share above one half, by halving."""
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < share:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < share else (low, middle)
    return high


def _t_below(value: float, freedom: int) -> float:
    """Return the distribution function of Student's t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for step in range(1 + odd, freedom, 2):
        total += term
        term *= square * step / (step + 1)
    within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + within / 2
