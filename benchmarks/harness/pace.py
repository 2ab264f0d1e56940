"""Current speed of this machine. On a virtual machine it changes by a fifth from one half minute to the next."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.models.catalog import resolve_model
from fd_core.simulation.costs.calibrating import StepBench
from fd_core.simulation.costs.fitting import CaseRow, StepCase
from fd_core.simulation.costs.profile import CostProfile

_READING = StepCase("decode", (CaseRow(256),))
_COMPUTING = StepCase("prefill", (CaseRow(0, 256),))


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of two steps: a memory-bound one and a compute-bound one."""

    memory: float
    compute: float

    def over(self, other: Pace) -> Pace:
        """Return how many times as long both take as at another time."""
        return Pace(self.memory / other.memory, self.compute / other.compute)

    def mean(self, other: Pace) -> Pace:
        """Return the pace between two times."""
        return Pace((self.memory + other.memory) / 2, (self.compute + other.compute) / 2)


class Pacer:
    """Separate engine that runs the two steps on demand."""

    def __init__(self, model: str, threads: int) -> None:
        config = EngineConfig(model=model, num_threads=threads, num_kv_blocks=64, structured_output=False)
        self._engine = load_engine(config, resolve_model(model).path, progress=lambda *_: None)

    def measure(self, seconds: float = 1.5, *, undisturbed: bool = False) -> Pace:
        """Measure for at least this long: means, or the lower quartiles that a calibration uses."""
        bench = StepBench(self._engine, (_READING, _COMPUTING))
        bench.measure(seconds, lambda *_: None)
        take = bench.usual if undisturbed else bench.mean
        return Pace(take(_READING), take(_COMPUTING))


@contextlib.contextmanager
def background_load(
    model: str, threads: int, processor: int
) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Run the two steps in another process on one processor, in a loop; yield a context manager that pauses it."""
    command = ["taskset", "-c", str(processor), sys.executable, __file__, model, str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError("the background load did not start")
            yield partial(_halted, process)
        finally:
            process.kill()


@contextlib.contextmanager
def _halted(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def paced(profile: CostProfile, pace: Pace) -> CostProfile:
    """Scale a profile to another pace: reading by the factor `memory`, the rest by `compute`."""
    step, request = profile.step, profile.request

    def longer(values: Any, names: tuple[str, ...], factor: float) -> Any:
        return replace(values, **{name: factor * getattr(values, name) for name in names})

    def curve(values: Any, factor: float) -> Any:
        return replace(values, seconds=tuple(factor * seconds for seconds in values.seconds))

    step = longer(step, ("constant", "per_row", "per_context_token", "per_shared_position"), pace.memory)
    step = longer(step, ("per_query_key", "per_draft"), pace.compute)
    step = replace(
        step, by_tokens=curve(step.by_tokens, pace.compute), by_sampled_rows=curve(step.by_sampled_rows, pace.memory)
    )
    return replace(profile, step=step, request=longer(request, ("turn", "turn_per_row"), pace.compute))


def _disturb(model: str, threads: str) -> None:
    pacer = Pacer(model, int(threads))
    print("begun", flush=True)
    while True:
        pacer.measure()


if __name__ == "__main__":
    _disturb(*sys.argv[1:])
