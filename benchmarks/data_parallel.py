"""Several engines of few cores beside one engine of all cores, behind the client that a server uses.

    python -m benchmarks.data_parallel [--model smollm2] [--engines 2] [--workloads w1,w2,w3] [--rounds 3]

The shapes of `benchmarks/harness/workloads.py` on random prompts, all requests of a workload at once. Both ways are
loaded at the same time and take turns; the one that waits costs nothing but memory. Printed are output tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

import numpy as np

from benchmarks.harness.workloads import SHAPES
from fd_core.config import EngineConfig
from fd_core.engine.client import EngineClient
from fd_core.engine.launch import open_client
from fd_core.models.catalog import resolve_model
from fd_core.testing.texts import greedy
from fd_core.types import RequestSpec


def requests(name: str, turn: str, seed: int) -> list[RequestSpec]:
    """Return random prompts of a workload's shape, the same for both ways."""
    shape, rng = SHAPES[name], np.random.default_rng(seed)
    prefix = rng.integers(5, 40_000, shape.shared).tolist()
    lengths = np.linspace(shape.min_input, shape.max_input, shape.requests).astype(int)
    return [
        greedy(f"{turn}-{index}", prefix + rng.integers(5, 40_000, length).tolist(), shape.max_tokens)
        for index, length in enumerate(lengths)
    ]


async def length_of(client: EngineClient, spec: RequestSpec) -> int:
    """Return the tokens of a text."""
    return sum([len(delta.token_ids) async for delta in client.submit(spec)])


async def measure(model: str, engines: int, names: list[str], rounds: int) -> None:
    """Print the rates of both ways."""
    config = EngineConfig(model=model, backend="cpu", max_model_len=1024)
    path = resolve_model(model).path
    clients = [await open_client(config, path), await open_client(config, path, engines=engines)]
    rates: dict[tuple[str, int], list[float]] = {}
    try:
        for turn in range(rounds):
            for name in names:
                for way in (0, 1) if turn % 2 == 0 else (1, 0):
                    specs = requests(name, f"{name}-{turn}", turn)
                    begun = time.perf_counter()
                    tokens = sum(await asyncio.gather(*(length_of(clients[way], spec) for spec in specs)))
                    rates.setdefault((name, way), []).append(tokens / (time.perf_counter() - begun))
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    print(f"{model}: output tokens a second, best and median of {rounds} rounds")
    for name in names:
        one, several = rates[name, 0], rates[name, 1]
        print(
            f"{name}: one engine {max(one):.1f} ({median(one):.1f}), {engines} engines {max(several):.1f} "
            f"({median(several):.1f}): {max(several) / max(one):.2f}x ({median(several) / median(one):.2f}x)",
            flush=True,
        )


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--workloads", default="w1,w2,w3")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    asyncio.run(measure(given.model, given.engines, given.workloads.split(","), given.rounds))


if __name__ == "__main__":
    main()
