"""One simulated plan as a job that another process may do: plain values in, what a report keeps of a run out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from fd_core.plugins import Plugins
from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.costs.profile import CostProfile
from fd_core.simulation.planning.shapes import DeploymentShape, setup_of
from fd_core.simulation.results.report import LOAD, ReportedRun, reported
from fd_core.simulation.results.slo import Slo
from fd_core.simulation.workloads.workload import Workload, read_workload
from fd_core.simulation.world import World

__all__ = ["PlanJob", "do_job"]


class PlanJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate."""

    shape: DeploymentShape
    units: int
    engine: dict[str, Any]
    """Other fields of engines."""
    workload: str
    """As `read_workload` takes it."""
    seed: int
    requests: int | None
    """The first so many; None takes all."""
    load: float
    rate: float
    """Arrivals a second, for whoever draws it."""
    slo: Slo
    price: float
    """Of a worker for an hour."""


def do_job(job: PlanJob, plugins: Plugins) -> ReportedRun:
    """Simulate a plan; equal jobs give equal runs. Raises `ConfigError` for settings that contradict each other."""
    asked = _workload(job.workload, job.seed)
    if job.requests is not None:
        asked = asked.shortened(job.requests)
    if job.load != 1:
        asked = asked.scaled(job.load)
    label = job.shape.described(job.units)
    setup = setup_of(job.shape, job.units, _profile(job.shape.profile), job.engine)
    run = World(setup.deployment(label, check=False), plugins, job.seed).run(asked)
    return reported(
        run,
        label,
        {LOAD: job.rate},
        slo=job.slo,
        price_per_worker_hour=job.price,
        devices_per_worker=job.shape.ranks,
    )


@lru_cache(maxsize=4)
def _workload(text: str, seed: int) -> Workload:
    return read_workload(text, seed)


@lru_cache(maxsize=64)
def _profile(name: str) -> CostProfile:
    return profile_named(name)
