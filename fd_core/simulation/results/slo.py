"""Service level objectives: limits of latencies, as users write them."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from fd_core.errors import ConfigError

MEASURES: Final = {
    "ttft": "time to the first token (TTFT)",
    "tpot": "time per output token after the first (TPOT)",
    "gap": "longest time between two deliveries",
    "e2e": "time of the whole request",
}
"""Name of each latency in SLOs and files, and its description. All are in seconds."""

_USUAL_ATTAINMENT: Final = 0.9
"""DistServe's default: this share of all requests meets every limit."""

_EXAMPLE: Final = "for example ttft_p99=0.5,tpot_p99=0.05, or ttft=0.5,tpot=0.05,attainment=0.95 for each request"


class Objective(msgspec.Struct, frozen=True):
    """One limit."""

    measure: str
    """A name of `MEASURES`."""
    statistic: str
    """`p` with a number or `mean`, over all requests; empty if the limit applies to each request."""
    limit: float
    """Seconds."""

    @property
    def name(self) -> str:
        """Text form without the limit."""
        return f"{self.measure}_{self.statistic}" if self.statistic else self.measure

    @property
    def percentile(self) -> float | None:
        """Number of the percentile; None if the statistic is not a percentile."""
        return float(self.statistic[1:]) if self.statistic.startswith("p") else None


class Slo(msgspec.Struct, frozen=True):
    """All limits of an SLO."""

    objectives: tuple[Objective, ...]
    attainment: float | None = None
    """Share of all requests that must meet the limits of each request, 0 to 1; None requires no share."""

    def request_limits(self) -> dict[str, float]:
        """Return the limits in seconds by measure for a good request: those of each, else the loosest percentile."""
        own = {each.measure: each.limit for each in self.objectives if not each.statistic}
        shared: dict[str, float] = {}
        for each in self.objectives:
            if each.percentile is not None:
                shared[each.measure] = max(each.limit, shared.get(each.measure, 0.0))
        return shared | own

    def __str__(self) -> str:
        parts = [f"{each.name}={each.limit:g}" for each in self.objectives]
        return ",".join(parts + ([] if self.attainment is None else [f"attainment={self.attainment:g}"]))


def parse_slo(text: str) -> Slo:
    """Read limits in seconds such as `ttft_p99=0.5,tpot_p99=0.05`, or of each request such as `ttft=0.5,tpot=0.05`.

    `attainment=0.95` is the share of requests that must meet the limits of each request, 0.9 by default. Raises
    `ConfigError` that names the invalid part and lists the choices.
    """
    objectives: dict[str, Objective] = {}
    attainment: float | None = None
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not equals or not 0 < number < math.inf:
            raise _wrong(f"expected NAME=NUMBER above 0, got {part.strip()!r}")
        if name in objectives or (name == "attainment" and attainment is not None):
            raise _wrong(f"{name} occurs twice")
        if name == "attainment":
            if number > 1:
                raise _wrong(f"expected an attainment of at most 1, got {value}")
            attainment = number
            continue
        measure, _, statistic = name.partition("_")
        if measure not in MEASURES or not _is_statistic(statistic) or name.endswith("_"):
            raise _wrong(f"unknown limit {name!r}")
        objectives[name] = Objective(measure, statistic, number)
    if not objectives:
        raise _wrong("there is no limit")
    slo = Slo(tuple(objectives.values()), attainment)
    if attainment is None and any(not each.statistic for each in slo.objectives):
        return msgspec.structs.replace(slo, attainment=_USUAL_ATTAINMENT)
    if attainment is not None and not slo.request_limits():
        raise _wrong("attainment needs a limit per request, not a mean")
    return slo


def _is_statistic(name: str) -> bool:
    if name in ("", "mean"):
        return True
    number = name.removeprefix("p")
    plain = number != name and number.replace(".", "", 1).isdecimal() and number.isascii()
    return plain and 0 < float(number) < 100


def _wrong(what: str) -> ConfigError:
    there_is = f"{', '.join(MEASURES)}, in seconds, alone or with _mean, _p50, _p99 and so on; and attainment, a share"
    return ConfigError(f"--slo: {what}: use {there_is}", field="--slo", hint=_EXAMPLE)
