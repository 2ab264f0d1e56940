"""Interleaved rounds: every engine computes a workload before any computes the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .machine import BandwidthProbe, load_average
from .processes import EngineFailedError
from .sessions import Session
from .stats import Run, wrong_counts
from .workloads import build

SETTLE_SECONDS = 0.3
"""Idle time between engines, in which the threads of the last one stop spinning."""


@dataclass(slots=True)
class Measurements:
    """Everything that the rounds produced."""

    runs: list[Run] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def order_of(sessions: Sequence[Session], turn: int) -> list[Session]:
    """Return the sessions rotated by `turn`, so that no engine always runs after the same neighbour."""
    start = turn % len(sessions)
    return [*sessions[start:], *sessions[:start]]


def measure(
    sessions: Iterable[Session],
    workloads: Sequence[str],
    rounds: int,
    corpus: Sequence[int],
    seed: int,
    probe: BandwidthProbe,
    report: Callable[[str, str, int, Run | str], None],
    warm_up: Sequence[str] | None = None,
) -> Measurements:
    """Run all rounds after one unmeasured warm-up; an engine that breaks or miscounts is left out from then on.

    `report(engine, workload, round, run or reason)` is called for each result; round 0 is the warm-up, which takes the
    same workloads unless `warm_up` names others.
    """
    alive = list(sessions)
    result = Measurements()
    for number in range(rounds + 1):
        result.bandwidths.append(probe.measure())
        result.loads.append(load_average())
        for at, name in enumerate(workloads if number or warm_up is None else warm_up):
            workload = build(name, corpus, seed * 1000 + number)
            for session in order_of(alive, number + at) if alive else ():
                engine = session.engine.name
                time.sleep(SETTLE_SECONDS)
                try:
                    run = session.run(workload, number)
                    problems = wrong_counts(run, workload.max_tokens)
                    if problems:
                        raise EngineFailedError("; ".join(problems))
                except EngineFailedError as error:
                    result.failures[engine] = f"{name}, round {number}: {error}"
                    report(engine, name, number, str(error))
                    alive.remove(session)
                    session.close()
                    continue
                report(engine, name, number, run)
                if number > 0:
                    result.runs.append(run)
    return result
