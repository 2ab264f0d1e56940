"""Time the host's part of a decode step, with a device that computes nothing.

    python -m benchmarks.host_step [--rows 1,64,256] [--rounds 9] [--steps 200] [--out host_step]

The pack's calls return at once and compute nothing, so a step is the runner alone: the plan, the arrays for the device,
and the bookkeeping of the result. Steps are pipelined as with `pipeline_depth` 2. The launches and copies of a real
pack and the scheduler are not included.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fd_core.backends.null import NullModel
from fd_core.cli.bench.compare.machine import describe, load_average
from fd_core.config import EngineConfig, Limits
from fd_core.ops.contract import Array, HostCopies, KVCache, PenaltyInput, SampleInput, StepInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.runner.runner import LaunchedStep, Runner
from fd_core.types import Admission, BlockGrant, SamplingParams, StepPlan

__all__ = ["KINDS", "HostSteps", "NothingOps", "median_microseconds"]

RESULTS = Path(__file__).resolve().parent / "results"
KINDS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=5),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.1),
}
VOCABULARY = 1000
"""On the host only the counts of a new request depend on it."""
PROMPT, BLOCK = 100, 16
WARM_UP = 20


class NothingOps(NumpyOps):
    """A device that computes nothing and takes no time."""

    on_host = False
    queues = True

    def __init__(self, cells: int) -> None:
        self._tokens = np.zeros(cells, np.int32)
        self._peaks = np.ones(cells, np.float32)

    def upload(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays."""
        return list(arrays)

    def fetch_later(self, arrays: Sequence[Array]) -> HostCopies:
        """Return the arrays."""
        return HostCopies(list(arrays))

    def gather_rows(self, x: Array, rows: Array) -> Array:
        """Return zeros."""
        return self._tokens[: len(rows)]

    def write_rows(self, x: Array, rows: Array, values: Array) -> Array:
        """Do nothing."""
        return x

    def add_at(self, x: Array, rows: Array, ids: Array, values: Array) -> Array:
        """Do nothing."""
        return x

    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        """Do nothing."""
        return logits

    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        """Return zeros."""
        count = len(rows.positions)
        return self._tokens[:count], self._peaks[:count]


class _NoModel(NullModel):
    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Compute nothing."""
        return None


class _NoPostprocess(Postprocess):
    serves = ("numpy",)

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array) -> Array:
        """Return zeros."""
        return np.zeros((self.limits.max_num_seqs, self.limits.max_drafts + 1), np.int32)


class HostSteps:
    """A runner whose slots all decode, one step launched while another is in flight."""

    def __init__(self, rows: int, params: SamplingParams, steps: int) -> None:
        per_slot = -(-(PROMPT + steps + 1) // BLOCK)
        limits = Limits(
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows, 16),
            max_model_len=per_slot * BLOCK,
            block_size=BLOCK,
            num_kv_blocks=rows * per_slot,
            vocab_size=VOCABULARY,
            max_drafts=min(EngineConfig(model="null").max_forced_tokens, max(rows, 16) - 1),
        )
        cells = rows * (limits.max_drafts + 1)
        self._runner = Runner(NothingOps(cells), _NoModel(VOCABULARY), limits, _NoPostprocess)
        blocks = np.arange(rows * per_slot, dtype=np.int32).reshape(rows, per_slot)
        self._slots = np.arange(rows, dtype=np.int32)
        text = np.arange(PROMPT, dtype=np.int32)
        admissions = tuple(Admission(slot, 1, text, PROMPT, params, (), PROMPT - 1) for slot in range(rows))
        grants = tuple(BlockGrant(slot, 0, own) for slot, own in enumerate(blocks))
        self._plans = iter([self._plan(0, admissions=admissions, grants=grants), *map(self._plan, range(1, steps))])
        self._flying: LaunchedStep = self._runner.launch(next(self._plans))

    def _plan(self, step: int, **more: Any) -> StepPlan:
        ones = np.ones(len(self._slots), np.int32)
        starts = (PROMPT - 1 + step) * ones
        return StepPlan(1, step, self._slots, ones, starts, ones, 0 * ones, ones.astype(np.bool_), **more)

    def step(self) -> float:
        """Launch a step and finish the one before; return the seconds that both took."""
        plan = next(self._plans)
        begun = time.perf_counter()
        assert self._runner.must_wait(plan) is None
        launched = self._runner.launch(plan)
        self._runner.finish(self._flying)
        took = time.perf_counter() - begun
        self._flying = launched
        return took


def median_microseconds(rows: int, params: SamplingParams, steps: int) -> float:
    """Return the median of so many steps, the first ones left out."""
    host = HostSteps(rows, params, steps + WARM_UP + 1)
    gc.collect()
    return 1e6 * median([host.step() for _ in range(steps + WARM_UP)][WARM_UP:])


def main() -> None:
    """Measure in turns, print and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="profile a step of 64 sampled rows and exit")
    parser.add_argument("--out", default="host_step")
    options = parser.parse_args()
    if options.profile:
        profile(lambda: median_microseconds(64, KINDS["sampled"], 2000))
        return
    before = load_average()
    cases = [(int(rows), kind) for rows in options.rows.split(",") for kind in KINDS]
    rounds = [
        [median_microseconds(rows, KINDS[kind], options.steps) for rows, kind in cases] for _ in range(options.rounds)
    ]
    results = [
        {
            "rows": rows,
            "kind": kind,
            "median_us": round(median(each), 1),
            "fastest_us": round(min(each), 1),
            "slowest_us": round(max(each), 1),
        }
        for (rows, kind), each in zip(cases, zip(*rounds, strict=True), strict=True)
    ]
    for row in results:
        print(row)
    facts = {
        "command": shlex.join(["python", "-m", "benchmarks.host_step", *sys.argv[1:]]),
        "machine": describe(),
        "load_average": [before, load_average()],
        "rounds": options.rounds,
        "steps_of_a_round": options.steps,
        "figures": "microseconds of a step on the host; a round's figure is the median of its steps",
        "results": results,
    }
    (RESULTS / f"{options.out}.json").write_text(json.dumps(facts, indent=1) + "\n")


def profile(run: Callable[[], float]) -> None:
    """Print where time goes."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
