"""When conversations begin: gaps of mean one, stretched by a rate and by the curve of a period."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.simulation.workloads.draws import Draws
from fd_core.simulation.workloads.settings import WorkloadSettings

__all__ = ["arrival_times"]

Floats = npt.NDArray[np.float64]

_CHUNK: Final = 1024
_CURVE_POINTS: Final = 2048


def arrival_times(settings: WorkloadSettings, draws: Draws) -> Iterator[float]:
    """Yield times in seconds, in order and without end.

    A greater rate takes the same gaps and makes them shorter, so load curves compare the same chances.
    """
    generator = draws.generator("arrivals")
    period, times, shares = _curve(settings)
    total = 0.0
    while True:
        passed = total + np.cumsum(_gaps(settings, generator))
        total = float(passed[-1])
        moments = passed / settings.rate
        if period:
            days, rest = np.divmod(moments / period, 1.0)
            moments = period * (days + np.interp(rest, shares, times))
        yield from (np.rint(moments * 1e6) / 1e6).tolist()


def _gaps(settings: WorkloadSettings, generator: np.random.Generator) -> Floats:
    if settings.arrivals == "constant":
        return np.ones(_CHUNK)
    if settings.arrivals == "gamma":
        shape = settings.cv**-2
        return generator.standard_gamma(shape, _CHUNK) / shape
    return generator.standard_exponential(_CHUNK)


def _curve(settings: WorkloadSettings) -> tuple[float, Floats, Floats]:
    """Return a period in seconds, moments in it, and the share of its arrivals up to each; 0 if there is none."""
    if settings.arrivals == "diurnal":
        times = np.linspace(0, 1, _CURVE_POINTS + 1)
        return settings.period, times, times - settings.depth / (2 * np.pi) * np.sin(2 * np.pi * times)
    if settings.arrivals == "bursts":
        period = settings.on + settings.off
        return period, np.array([0, settings.on / period, 1.0]), np.array([0, 1 - settings.quiet, 1.0])
    return 0.0, np.empty(0), np.empty(0)
