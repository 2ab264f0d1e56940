"""Compare one engine on all processors with two ranks, stages or engines on half of them; and the cost of ranks.

    python -m benchmarks.parallel steps [--ways one,engines,ranks] [--workloads w1,w2,w3] [--rounds 3]
    python -m benchmarks.parallel steps --model 1b --requests 8
    python -m benchmarks.parallel sums
    python -m benchmarks.parallel plans [--ranks 8]

`steps` runs the shapes of `fd_core/cli/bench/compare/workloads.py` on random prompts, all requests of one at once,
through the client that a server uses. All ways are loaded at the same time and take turns; those that wait cost only
memory. The model `1b` has random weights, which `benchmarks/random_gguf.py` writes. `sums` compares sums over shared
memory and over gloo, inside a fusion and from Python, with gloo's own. `plans` measures what rank 0 adds to a step of
the null backend before it computes, and until all ranks have answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from fd_core.cli.bench.compare.workloads import SHAPES
from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.engine.ranks.groups import joined_group, opened_group
from fd_core.engine.ranks.leading import LeadingRunner
from fd_core.engine.ranks.messages import RankStep, encode_order
from fd_core.models.catalog import resolve_model
from fd_core.ops.parallel import Parallel, RankGroup, RankRendezvous
from fd_core.testing.models.texts import greedy, run
from fd_core.types import RequestSpec

ROWS = (1, 8, 32, 128, 512)
WIDTH = 576
REPEATS = 200
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "engines": {},
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "apart": {"pipeline_parallel_size": 2, "pipeline_depth": 1},
    "deep": {"pipeline_parallel_size": 2, "pipeline_depth": 3},
}
"""Ways to use the processors, with their changes to an engine's settings. Stages that are `apart` never compute at
the same time; `deep` are those with three plans in flight."""
RANDOM_1B = Path.home() / ".cache/fd_core/compare/1b-q4_1.gguf"


def typical(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the median microseconds of a call."""
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return median(seconds) * 1e6


SUMS: dict[str, str] = {
    "shared memory, native": "shared_memory",
    "shared memory, Python": "shared_memory",
    "over gloo, native": "gloo",
    "over gloo, Python": "gloo",
    "gloo's own all_reduce": "gloo",
    "tensors, as on devices": "gloo",
}
"""Ways to add up, and the groups of ranks that they need."""


def sums_of(kind: str, group: RankGroup) -> dict[int, float]:
    """Take sums of `ROWS` as one of two ranks, and return the microseconds of each."""
    if kind.endswith("native"):
        return native_sums(group)
    if kind.endswith("Python"):
        wholes = {rows: np.ones((rows, WIDTH), np.float32) for rows in ROWS}
        return {rows: typical(partial(group.all_reduce, x)) for rows, x in wholes.items()}
    import torch

    from fd_core.ops.torch.group import TorchCollectives, gloo_group, shared_store

    torch.set_num_threads(1)
    gloo = gloo_group(shared_store(group), group.parallel, group.host, 60.0)
    arrays = {rows: torch.ones(rows, WIDTH) for rows in ROWS}
    if kind.startswith("tensors"):
        collectives = TorchCollectives(gloo, group.parallel)
        return {rows: typical(partial(collectives.all_reduce, x)) for rows, x in arrays.items()}
    return {rows: typical(lambda: gloo.allreduce([x]).wait()) for rows, x in arrays.items()}  # noqa: B023 - called at once


def native_sums(group: RankGroup) -> dict[int, float]:
    """Time a program of sums, each after a product so small that it takes next to no time."""
    from fd_core.ops.contract import StepInput
    from fd_core.ops.native import load_native_ops
    from fd_core.ops.native.program import ProgramRecorder, symbolic_step
    from fd_core.ops.weights import RawTensor

    ops = load_native_ops("float32", 1)
    assert ops is not None
    ops.join(group)
    recorder = ProgramRecorder(ops.runtime)
    weight = ops.prepare_linear([RawTensor("F32", np.zeros((WIDTH, 16), np.float32))])
    _, x = recorder.output(symbolic_step(recorder).token_ids, 16, True)
    _, residual = recorder.output(x, WIDTH, True)
    count = 60
    for _ in range(count):
        residual = ops.project_residual(x, weight, residual)
    found = {}
    for rows in ROWS:
        one = np.zeros(rows, np.int32)
        step = StepInput(one, one, one, one, one, one.reshape(-1, 1), one, max_query=1, max_context=1)
        found[rows] = typical(lambda: recorder.run(step, rows), 20) / count  # noqa: B023 - called at once
    return found


def sums() -> None:
    """Print the time of a sum by each way."""
    print(f"microseconds of one sum of [rows, {WIDTH}] float32 over two ranks, median of {REPEATS}")
    print("| way | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |")
    for kind, transport in SUMS.items():
        group, place = opened_group(2, 60.0, transport)
        address = f"/proc/{os.getpid()}/fd/{place}" if isinstance(place, int) else place
        command = [sys.executable, "-m", "benchmarks.parallel", "sums-of", kind, msgspec.json.encode(address).decode()]
        other = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            found = sums_of(kind, group)
        finally:
            other.wait(60)
        print(f"| {kind} | " + " | ".join(f"{found[rows]:.1f}" for rows in ROWS) + " |", flush=True)


def requests(name: str, turn: str, seed: int, most: int | None) -> list[RequestSpec]:
    """Return random prompts of a workload's shape, `most` at most, the same for every way."""
    shape, rng = SHAPES[name], np.random.default_rng(seed)
    prefix = rng.integers(5, 40_000, shape.shared).tolist()
    count = min(shape.requests, most or shape.requests)
    lengths = np.linspace(shape.min_input, shape.max_input, count).astype(int)
    return [
        greedy(f"{turn}-{index}", prefix + rng.integers(5, 40_000, length).tolist(), shape.max_tokens)
        for index, length in enumerate(lengths)
    ]


async def length_of(client: EngineClient, spec: RequestSpec) -> int:
    """Return the tokens of a text."""
    return sum([len(delta.token_ids) async for delta in client.submit(spec)])


async def steps(model: str, dtype: str, ways: list[str], names: list[str], rounds: int, most: int | None) -> None:
    """Print output tokens a second of each way, compared with the first."""
    path = resolve_model(model).path
    config = EngineConfig(model=model, backend="cpu", dtype=dtype, max_model_len=1024, kv_cache_memory=512 << 20)
    clients: list[EngineClient] = []
    rates: dict[tuple[str, str], list[float]] = {}
    try:
        for way in ways:
            own = msgspec.structs.replace(config, **WAYS[way])
            clients.append(await open_client(own, path, engines=2 if way == "engines" else 1))
        turns = list(zip(ways, clients, strict=True))
        for turn in range(rounds):
            for name in names:
                for way, client in turns if turn % 2 == 0 else reversed(turns):
                    specs = requests(name, f"{name}-{turn}", turn, most)
                    begun = time.perf_counter()
                    tokens = sum(await asyncio.gather(*(length_of(client, spec) for spec in specs)))
                    rates.setdefault((name, way), []).append(tokens / (time.perf_counter() - begun))
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    print(f"{model}, {dtype}: output tokens a second, best (median) of {rounds} rounds")
    print("| | " + " | ".join(ways) + " |")
    print("|---" * (len(ways) + 1) + "|")
    for name in names:
        first = max(rates[name, ways[0]])
        cells = [
            f"{max(each):.1f} ({median(each):.1f}), {max(each) / first:.2f}x"
            for each in (rates[name, way] for way in ways)
        ]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def plans(ranks: int) -> None:
    """Print the time that broadcasts to the ranks add to a step of the null backend."""
    settings: dict[str, Any] = {"max_num_seqs": 32, "num_kv_blocks": 512, "max_model_len": 512, "pipeline_depth": 1}
    config = EngineConfig(model="null", backend="null", tensor_parallel_size=ranks, **settings)
    engine = load_engine(config, None, progress=lambda *_: None)
    runner = engine.probe().runner
    assert isinstance(runner, LeadingRunner)
    sent, compared = [], []
    processes = runner.ranks
    broadcast, compare = processes.broadcast, processes.compare

    def timed(call: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
        def timing(*arguments: Any) -> None:
            begun = time.perf_counter()
            call(*arguments)
            seconds.append(time.perf_counter() - begun)

        return timing

    encoded: list[float] = []
    execute = runner.execute

    def executing(plan: Any) -> Any:
        begun = time.perf_counter()
        encode_order(RankStep(plan, *runner.batch.guesses()))
        encoded.append(time.perf_counter() - begun)
        return execute(plan)

    processes.broadcast, processes.compare = timed(broadcast, sent), timed(compare, compared)  # type: ignore[method-assign]
    runner.execute = executing  # type: ignore[method-assign]
    run(engine, [greedy(f"r{i}", range(1, 60), 200) for i in range(32)])
    engine.close()
    parts = [median(each) * 1e6 for each in (encoded, sent, compared)]
    print(f"{ranks} ranks, {len(sent)} steps of 32 requests, median microseconds:")
    ahead = parts[0] + parts[1]
    print(f"encode {parts[0]:.0f}, send to {ranks - 1} ranks {parts[1]:.0f}: {ahead:.0f} before rank 0 computes")
    print(f"until all have answered, their own steps on {len(os.sched_getaffinity(0))} cores included: {parts[2]:.0f}")


def main() -> None:
    """Run the chosen measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("sums")
    hidden = parts.add_parser("sums-of")
    for argument in ("kind", "place"):
        hidden.add_argument(argument)
    stepping = parts.add_parser("steps")
    stepping.add_argument("--model", default="smollm2", help="1b for random weights")
    stepping.add_argument("--dtype", default="bfloat16")
    stepping.add_argument("--ways", default="one,engines,ranks")
    stepping.add_argument("--workloads", default="w1,w2,w3")
    stepping.add_argument("--rounds", type=int, default=3)
    stepping.add_argument("--requests", type=int, help="at most so many at once")
    planning = parts.add_parser("plans")
    planning.add_argument("--ranks", type=int, default=8)
    asked = parser.parse_args()
    match asked.part:
        case "sums":
            sums()
        case "sums-of":
            place = msgspec.json.decode(asked.place, type=str | RankRendezvous)
            sums_of(asked.kind, joined_group(Parallel(1, 2), place, 60.0))
        case "steps":
            ways, names = asked.ways.split(","), asked.workloads.split(",")
            if not set(ways) <= WAYS.keys() or not set(names) <= SHAPES.keys():
                parser.error(f"ways are {', '.join(WAYS)}; workloads are {', '.join(SHAPES)}")
            model = str(RANDOM_1B) if asked.model == "1b" else asked.model
            if asked.model == "1b" and not RANDOM_1B.exists():
                parser.error(f"there is no {model}: python benchmarks/random_gguf.py 1b q4_1 -o {model}")
            asyncio.run(steps(model, asked.dtype, ways, names, asked.rounds, asked.requests))
        case "plans":
            plans(asked.ranks)


if __name__ == "__main__":
    main()
