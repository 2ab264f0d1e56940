"""Choices of a deployment as plain values: profiles, roles, batches and step token budgets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from fd_core.errors import ConfigError
from fd_core.plugins import Plugins
from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.costs.profile import CostProfile
from fd_core.simulation.results.report import LOAD, ReportedRun, reported
from fd_core.simulation.results.slo import Slo
from fd_core.simulation.setups import Setup
from fd_core.simulation.workloads.workload import read_workload
from fd_core.simulation.world import World

_MOST_SHAPES: Final = 1000
_MOST_OF_A_ROLE: Final = 64
_workload: Final = lru_cache(maxsize=4)(read_workload)
_profile: Final = lru_cache(maxsize=64)(profile_named)


class DeploymentShape(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment without its size. A unit is one mixed worker, or `prefill` and `decode` workers together."""

    profile: str
    """Name for `profile_named`."""
    ranks: int
    """Devices of a worker."""
    prefill: int
    """Workers of a unit; 0 for mixed ones."""
    decode: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def workers(self) -> int:
        """Workers of a unit."""
        return self.prefill + self.decode or 1

    @property
    def devices(self) -> int:
        """Devices of a unit."""
        return self.workers * self.ranks

    def workers_text(self, units: int) -> str:
        """Return the workers of a plan in words."""
        several = f"{self.prefill * units} prefill + {self.decode * units} decode" if self.prefill else f"{units}"
        return f"{several} x {self.profile}"

    def described(self, units: int) -> str:
        """Return a plan in words."""
        return (
            f"{self.workers_text(units)}, max_num_seqs {self.max_num_seqs}, "
            f"max_num_batched_tokens {self.max_num_batched_tokens}"
        )

    def flags(self, units: int) -> list[str]:
        """Return the flags of `fdcore simulate` that reproduce a plan."""
        roles = {"--prefill": self.prefill * units, "--decode": self.decode * units}
        return [
            *("--profile", self.profile),
            *(str(each) for pair in (roles.items() if self.prefill else [("--workers", units)]) for each in pair),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
        ]


def parse_roles(text: str) -> tuple[tuple[int, int], ...]:
    """Read `mixed,1:1,1:2` as prefill and decode workers of a unit, 0 and 0 for mixed. Raises `ConfigError`."""
    found: dict[tuple[int, int], None] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        prefill, colon, decode = word.partition(":")
        if word == "mixed":
            found[0, 0] = None
            continue
        if not (colon and prefill.isdecimal() and decode.isdecimal() and word.isascii()):
            what = f"--roles: expected `mixed` or PREFILL:DECODE, got {word!r:.40}"
            raise ConfigError(what, field="--roles", hint="for example mixed,1:1,1:2")
        sizes = int(prefill), int(decode)
        if not all(1 <= size <= _MOST_OF_A_ROLE for size in sizes):
            raise ConfigError(f"--roles: {word}: expected 1 to {_MOST_OF_A_ROLE} of each", field="--roles")
        common = math.gcd(*sizes)
        found[sizes[0] // common, sizes[1] // common] = None
    if not found:
        raise ConfigError("--roles is empty", field="--roles", hint="for example mixed,1:1,1:2")
    return tuple(found)


def shapes_of(
    profiles: Mapping[str, CostProfile],
    roles: Sequence[tuple[int, int]],
    max_num_seqs: Sequence[int],
    budgets: Sequence[int],
) -> list[DeploymentShape]:
    """Return every combination, with the profile's batch and budget by default. Raises `ConfigError` for too many."""
    made = [
        DeploymentShape(
            profile=name,
            ranks=profile.ranks,
            prefill=prefill,
            decode=decode,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
        )
        for name, profile in profiles.items()
        for (prefill, decode), rows, budget in itertools.product(
            roles, max_num_seqs or [profile.limits.max_num_seqs], budgets or [profile.limits.max_num_batched_tokens]
        )
        if budget >= rows
    ]
    if not 0 < len(made) <= _MOST_SHAPES:
        what = f"got {len(made):,} combinations of profiles, roles, batches and budgets"
        hint = "pass fewer of each; a budget is at least a batch"
        raise ConfigError(f"{what}; expected 1 to {_MOST_SHAPES:,}", field="--max-num-seqs", hint=hint)
    return made


def setup_of(shape: DeploymentShape, units: int, profile: CostProfile, given: Mapping[str, Any]) -> Setup:
    """Return the setup to simulate; `given` are other fields of engines."""
    return Setup(
        profile=profile,
        workers=0 if shape.prefill else units,
        prefill=shape.prefill * units,
        decode=shape.decode * units,
        engine=dict(given, max_num_seqs=shape.max_num_seqs, max_num_batched_tokens=shape.max_num_batched_tokens),
    )


class PlanJob(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation to run."""

    shape: DeploymentShape
    units: int
    engine: dict[str, Any]
    """Other fields of engines."""
    workload: str
    """Text for `read_workload`."""
    seed: int
    requests: int | None
    """Limit of the number of requests; None takes all."""
    load: float
    rate: float
    """Arrivals per second, for workloads that draw them."""
    slo: Slo
    price: float
    """Price of a worker per hour."""


def do_job(job: PlanJob, plugins: Plugins) -> ReportedRun:
    """Simulate a plan; equal jobs give equal runs. Raises `ConfigError` for settings that contradict each other."""
    asked = _workload(job.workload, job.seed)
    if job.requests is not None:
        asked = asked.shortened(job.requests)
    if job.load != 1:
        asked = asked.scaled(job.load)
    label = job.shape.described(job.units)
    setup = setup_of(job.shape, job.units, _profile(job.shape.profile), given=job.engine)
    run = World(setup.deployment(label, check=False), plugins, job.seed).run(asked)
    return reported(
        run, label, {LOAD: job.rate}, slo=job.slo, price_per_worker_hour=job.price, devices_per_worker=job.shape.ranks
    )
