"""Several ranks, as threads: sums and gathers, and models with the same results as on one rank.

A pack with `Parallel.gathers` has the bits of one rank, in every dtype and quantization. Others need not, and the
engine logs a warning at start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fd_core.errors import ConfigError
from fd_core.ops.contract import Ops
from fd_core.ops.parallel import RankGroup
from fd_core.testing.kit.ranks import gloo_ranks, on_ranks, shared_memory_ranks
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.arrays import Values, assert_same, assert_within
from fd_core.testing.models.paged import PagedDriver
from fd_core.testing.suite.test_models import adapted_by

REQUIRES = ("primitives",)

PROMPTS = [[3], list(range(7, 30)), [11, 5, 159, 5]]
Computed = tuple[bool, list[list[int]], npt.NDArray[np.float32]]
"""True if ranks gather, and the texts and logits of `PROMPTS`."""


def joined(target: Target, group: RankGroup) -> Ops:
    """Return a separate pack for a rank; skip the test if the backend has no ranks, or only in separate processes."""
    ops = target.cls(target.config()).make_ops()
    try:
        if any(target.cls.rank_environments(group.parallel.size)):
            lacks("each rank needs a separate device, and so a separate process")
        ops.join(group)
    except ConfigError as error:
        lacks(error.message)
    return ops


def transported(transport: str) -> Callable[[int, float], Sequence[RankGroup]]:
    if transport == "shared_memory":
        return shared_memory_ranks
    pytest.importorskip("torch")
    return gloo_ranks


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(1, 576), (33, 70), (0, 16)])
def test_sums_and_gathers_have_the_same_bits_on_all_ranks(
    target: Target, size: int, shape: tuple[int, int], transport: str
) -> None:
    """Sums are in the order of ranks, so a row's result does not depend on the batch."""
    parts = [Values(seed=rank)(*shape) for rank in range(size)]

    def work(group: RankGroup) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        ops = joined(target, group)
        mine = ops.from_host(parts[group.parallel.rank])
        return ops.to_host(ops.all_reduce(mine)).copy(), ops.to_host(ops.all_gather(mine)).copy()

    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    for reduced, gathered in on_ranks(size, work, make=transported(transport)):
        assert_same(reduced, total)
        assert_same(gathered, np.concatenate(parts, axis=1))


def computed_by_ranks(
    target: Target, path: Path | None, adapters: Sequence[Path] = (), transport: str = "shared_memory"
) -> tuple[list[Computed], Computed]:
    """Return the results of two ranks and of one; those of the two must be equal, and equal to the one if they
    gather."""

    def run(ops: Ops) -> Computed:
        model = target.cls(target.config()).load_model(path, ops, lambda *_: None)
        if adapters and path is not None:
            model = adapted_by(model, path, adapters)
        places = [2, 0, 1] if adapters else None
        driver = PagedDriver(model, ops, PROMPTS, 64, kv_dtype="auto" if adapters else target.kv_dtype, places=places)
        driver.generate(8, 5)
        logits = np.concatenate([np.stack(row.logits) for row in driver.rows])
        return ops.parallel.gathers, [row.generated for row in driver.rows], logits

    alone = run(target.backend.make_ops())
    ranks = on_ranks(2, lambda group: run(joined(target, group)), make=transported(transport))
    assert_same(ranks[0][2], ranks[1][2])
    if ranks[0][0]:
        assert_same(ranks[0][2], alone[2])
    return ranks, alone


@pytest.mark.parametrize(
    ("case", "transport"),
    [
        ("llama-biases-wide-heads", "shared_memory"),
        ("llama-biases-wide-heads", "gloo"),
        ("qwen3-moe", "shared_memory"),
        ("gemma3", "shared_memory"),
        ("ernie-moe", "gloo"),
    ],
)
def test_two_ranks_compute_what_one_does(target: Target, case: str, transport: str) -> None:
    ranks, (_, texts, logits) = computed_by_ranks(target, target.checkpoint(case), transport=transport)
    if ranks[0][0] or target.exact:
        assert ranks[0][1] == texts
        assert_within(ranks[0][2], logits, atol=5e-5)


def test_two_ranks_add_what_an_adapter_adds_on_one(target: Target, checkpoints: Path) -> None:
    """Shard adapters as weights: two requests with different adapters and one without."""
    path = target.checkpoint("llama-biases-wide-heads")
    if path is None:
        lacks("it reads no checkpoint")
    adapters = [write_adapter(path, checkpoints / f"of-ranks-{seed}", seed=seed, rank=1 + seed) for seed in (1, 2)]
    ranks, (_, _, alone) = computed_by_ranks(target, path, adapters)
    if target.exact and not ranks[0][0]:
        assert_within(ranks[0][2], alone, atol=1e-4)
