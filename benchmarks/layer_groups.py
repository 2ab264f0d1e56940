"""Print the KV of a long request with and without groups of layers, and the cost of planning with them.

    python benchmarks/layer_groups.py
    python benchmarks/layer_groups.py --context 131072 --running 256

KV is computed from shapes, in bfloat16; no model is loaded. Planning is timed in steady decode, as prompts of different
lengths fill their blocks; the two kinds take turns, and the ratio is that of a round, since machines drift.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from fd_core.config import Limits
from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.models.layer_groups import divide_layers, places_of
from fd_core.ops.contract import KVShape
from fd_core.simulation.engines.scripted import ScriptedEngine

_ITEM = 2
"""Bytes of an element in bfloat16."""
_ROUNDS, _STEPS = 9, 160


@dataclass(frozen=True, slots=True)
class Shape:
    """Windows of a model's layers, and its KV heads."""

    name: str
    windows: tuple[int | None, ...]
    kv_heads: int
    head_dim: int

    def block_bytes(self, groups: LayerGroups, block_size: int) -> int:
        """Return the bytes of a block."""
        layers = 1 + max(index for _, index in places_of(self.windows, groups))
        return KVShape(layers, self.kv_heads, self.head_dim, block_size).bytes_per_block(_ITEM)


SHAPES = (
    Shape("Gemma 3 270M", (*((512,) * 5 + (None,)) * 3,), 1, 256),
    Shape("Gemma 3 1B", (*((512,) * 5 + (None,)) * 4, 512, 512), 1, 256),
    Shape("Mistral 7B v0.1", (4096,) * 32, 8, 128),
    Shape("gpt-oss 20B", (128, None) * 12, 8, 64),
)


def engine_of(groups: LayerGroups, running: int, steps: int, block_size: int) -> ScriptedEngine:
    """Return requests in steady decode whose prompts have different lengths."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 8 * block_size, running).tolist()
    longest = max(lengths) + steps + 2
    limits = Limits(
        max_num_seqs=running,
        max_num_batched_tokens=sum(lengths),
        max_model_len=longest,
        block_size=block_size,
        num_kv_blocks=running * groups.count * (-(-longest // block_size) + 2),
        vocab_size=32000,
        groups=groups,
    )
    engine = ScriptedEngine(limits, draw)
    for length in lengths:
        engine.add(draw.integers(1, 1000, length).tolist(), steps + 2)
    turn(engine, 1)
    return engine


def turn(engine: ScriptedEngine, steps: int) -> float:
    """Return the mean seconds of CPU for planning and committing over some steps."""
    spent = 0.0
    for _ in range(steps):
        begin = time.thread_time()
        plan = engine.plan()
        planned = time.thread_time()
        output = engine.answer(plan)
        answered = time.thread_time()
        engine.commit(plan, output)
        spent += planned - begin + time.thread_time() - answered
    return spent / steps


def main(arguments: list[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768, help="tokens of a request (default: 32768)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block (default: 16)")
    parser.add_argument("--running", type=int, default=32, help="requests whose steps are planned (default: 32)")
    options = parser.parse_args(arguments)
    size, console = options.block_size, Console(width=120)
    kept = Table("model", "groups", "one group", "groups of layers", "times", "planning", "times")
    for shape in SHAPES:
        groups = divide_layers(shape.windows, options.context + 1)
        before = ONE_GROUP.blocks(options.context, size) * shape.block_bytes(ONE_GROUP, size)
        after = groups.blocks(options.context, size) * shape.block_bytes(groups, size)
        pair = [engine_of(each, options.running, _ROUNDS * _STEPS, size) for each in (ONE_GROUP, groups)]
        rounds = [[turn(engine, _STEPS) for engine in pair] for _ in range(_ROUNDS)]
        planning = f"{median(one for one, _ in rounds) * 1e6:.0f} -> {median(many for _, many in rounds) * 1e6:.0f} us"
        kept.add_row(
            shape.name,
            f"{groups.whole} + {groups.sliding} of {groups.window:,}",
            f"{before / 2**20:,.0f} MiB",
            f"{after / 2**20:,.0f} MiB",
            f"{before / after:.2f}",
            planning,
            f"{median(many / one for one, many in rounds):.2f}",
        )
    console.print(f"KV of a request of {options.context:,} tokens; a step of {options.running} requests")
    console.print(kept)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
