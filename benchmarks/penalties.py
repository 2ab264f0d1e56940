"""Time the cost of penalties in a decode step: 32 rows of 32,768 tokens each, with and without.

    python -m benchmarks.penalties [--packs native,torch,numpy] [--vocabulary 49152] [--rows 32] [--context 32768]

The model is a stub that hands out the same logits at once, so that a step is the runner's work outside the forward
pass: input, penalties, sampling, the way to the host. Steps with all three penalties and steps without take turns. Two
kinds of text: `words` has as many different tokens as English of that length (Zipf's law), `uniform` as many as can be.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fd_core.backends.null import NullModel
from fd_core.cli.bench.compare.machine import describe, load_average
from fd_core.config import Limits
from fd_core.ops.contract import Array, KVCache, Ops, StepInput
from fd_core.plugins import POSTPROCESS, installed_plugins
from fd_core.runner.runner import Runner
from fd_core.types import Admission, BlockGrant, IntArray, SamplingParams, StepPlan

RESULTS = Path(__file__).resolve().parent / "results"
PLAIN = SamplingParams(temperature=0.0)
PENALIZED = SamplingParams(
    temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.1, max_tokens=100_000
)
BLOCK = 1024
WARM_UP = 5


def native() -> Ops:
    from fd_core.ops.native import load_native_ops

    ops = load_native_ops("float32", len(os.sched_getaffinity(0)))
    if ops is None:
        raise SystemExit("the native kernels cannot be built here")
    return ops


def torch() -> Ops:
    from fd_core.ops.torch.ops import TorchOps

    return TorchOps()


def numpy() -> Ops:
    from fd_core.ops.numpy.ops import NumpyOps

    return NumpyOps()


def paddle() -> Ops:
    from fd_core.ops.paddle.ops import PaddleOps

    return PaddleOps()


PACKS: Mapping[str, Callable[[], Ops]] = {"native": native, "torch": torch, "numpy": numpy, "paddle": paddle}


class Stub(NullModel):
    """The same logits for every step."""

    def __init__(self, ops: Ops, rows: int, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self._ops = ops
        self._logits = np.random.default_rng(0).standard_normal((rows, vocabulary), np.float32) * np.float32(4)

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Return a copy, because a sampler may write into it."""
        return self._ops.from_host(self._logits.copy())


def words(rng: np.random.Generator, context: int, vocabulary: int) -> IntArray:
    """Return a text whose r-th commonest token is 1 / (r + 2.7) as common, in ids that follow no order."""
    shares = 1 / (np.arange(vocabulary) + 2.7)
    return rng.permutation(vocabulary).astype(np.int32)[rng.choice(vocabulary, context, p=shares / shares.sum())]


def uniform(rng: np.random.Generator, context: int, vocabulary: int) -> IntArray:
    """Return a text of tokens that are all as common."""
    return rng.integers(0, vocabulary, context, dtype=np.int32)


TEXTS = {"words": words, "uniform": uniform}


class Decode:
    """A runner whose slots all decode, one step after the other."""

    def __init__(self, ops: Ops, texts: list[IntArray], vocabulary: int, steps: int, params: SamplingParams) -> None:
        rows, self._length, self._step = len(texts), len(texts[0]), 0
        longest = self._length + steps + 1
        per_slot = -(-longest // BLOCK)
        limits = Limits(
            max_num_seqs=rows,
            max_num_batched_tokens=rows,
            max_model_len=longest,
            block_size=BLOCK,
            num_kv_blocks=rows * per_slot,
            vocab_size=vocabulary,
        )
        postprocess = installed_plugins().load(POSTPROCESS, ops.framework)
        self._runner = Runner(ops, Stub(ops, rows, vocabulary), limits, postprocess)
        self._rows = np.arange(rows, dtype=np.int32)
        # Half of each text counts as generated. No KV is computed, because the stub reads none.
        self._admissions = tuple(
            Admission(slot, 1, text, self._length // 2, params, (), self._length - 1) for slot, text in enumerate(texts)
        )
        blocks = np.arange(rows * per_slot, dtype=np.int32).reshape(rows, per_slot)
        self._grants = tuple(BlockGrant(slot, 0, own) for slot, own in enumerate(blocks))

    def step(self) -> float:
        """Compute a step and return its seconds."""
        first = self._step == 0
        count = len(self._rows)
        plan = StepPlan(
            epoch=1,
            step=self._step,
            slots=self._rows,
            gens=np.ones(count, np.int32),
            starts=np.full(count, self._length - 1 + self._step, np.int32),
            num_tokens=np.ones(count, np.int32),
            num_drafts=np.zeros(count, np.int32),
            samples=np.ones(count, np.bool_),
            admissions=self._admissions if first else (),
            grants=self._grants if first else (),
        )
        self._step += 1
        begun = time.perf_counter()
        self._runner.execute(plan)
        return time.perf_counter() - begun


def measure(ops: Ops, text: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of steps with and without penalties, in milliseconds."""
    rng = np.random.default_rng(1)
    texts = [TEXTS[text](rng, options.context, options.vocabulary) for _ in range(options.rows)]
    steps = options.steps + WARM_UP
    plain = Decode(ops, texts, options.vocabulary, steps, PLAIN)
    penalized = Decode(ops, texts, options.vocabulary, steps, PENALIZED)
    pairs = [(plain.step(), penalized.step()) for _ in range(steps)][WARM_UP:]
    without, with_penalties = (median(column) * 1e3 for column in zip(*pairs, strict=True))
    return {
        "text": text,
        "different_tokens": int(median(len(np.unique(each)) for each in texts)),
        "without_ms": round(without, 3),
        "with_ms": round(with_penalties, 3),
        "added_ms": round(median(after - before for before, after in pairs) * 1e3, 3),
        "added_to_the_fastest_ms": round(
            (min(after for _, after in pairs) - min(before for before, _ in pairs)) * 1e3, 3
        ),
        "ratio": round(with_penalties / without, 2),
    }


def main() -> None:
    """Measure, print and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", default="native,torch,numpy")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", default="penalties")
    options = parser.parse_args()
    before = load_average()
    rows = [
        {"pack": name, **measure(ops, text, options)}
        for name in options.packs.split(",")
        for ops in [PACKS[name]()]
        for text in TEXTS
    ]
    for row in rows:
        print(row)
    facts = {
        "command": shlex.join(["python", "-m", "benchmarks.penalties", *sys.argv[1:]]),
        "machine": describe(),
        "load_average": [before, load_average()],
        "rows_of_a_step": options.rows,
        "context": options.context,
        "vocabulary": options.vocabulary,
        "medians_over_steps": options.steps,
        "results": rows,
    }
    (RESULTS / f"{options.out}.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
