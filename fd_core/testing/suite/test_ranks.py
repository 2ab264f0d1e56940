"""Several ranks, as threads: sums and gathers by their definition, and models that compute what one rank computes.

A pack that says so by `Parallel.gathers` has the bits of one rank, in every dtype and quantization. Others need not,
and the engine warns of them at start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fd_core.backends.contract import AdaptableModel
from fd_core.errors import ConfigError
from fd_core.models.loading.adapter import read_adapter
from fd_core.models.loading.checkpoint import open_checkpoint
from fd_core.models.registry import spec_of
from fd_core.ops.contract import Ops
from fd_core.ops.parallel import RankGroup
from fd_core.testing.kit.ranks import gloo_ranks, on_ranks, shared_memory_ranks
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.arrays import Values
from fd_core.testing.models.paged import PagedDriver

REQUIRES = ("primitives",)

PROMPTS = [[3], list(range(7, 30)), [11, 5, 159, 5]]


def joined(target: Target, group: RankGroup) -> Ops:
    """Return a pack of its own for a rank; skips where the backend has no ranks, or none in one process."""
    ops = target.cls(target.config()).make_ops()
    try:
        if any(target.cls.rank_environments(group.parallel.size)):
            lacks("each rank has a device, and so a process, of its own")
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
    """Sums are taken in the order of ranks, so a row's do not depend on the rows beside it."""
    parts = [Values(seed=rank)(*shape) for rank in range(size)]

    def work(group: RankGroup) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        ops = joined(target, group)
        mine = ops.from_host(parts[group.parallel.rank])
        return ops.to_host(ops.all_reduce(mine)).copy(), ops.to_host(ops.all_gather(mine)).copy()

    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    for reduced, gathered in on_ranks(size, work, make=transported(transport)):
        np.testing.assert_array_equal(reduced, total)
        np.testing.assert_array_equal(gathered, np.concatenate(parts, axis=1))


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
    path = target.checkpoint(case)

    def run(ops: Ops) -> tuple[list[list[int]], npt.NDArray[np.float32]]:
        model = target.cls(target.config()).load_model(path, ops, lambda *_: None)
        driver = PagedDriver(model, ops, PROMPTS, 64, kv_dtype=target.kv_dtype)
        driver.generate(8, 5)
        return [row.generated for row in driver.rows], np.concatenate([np.stack(row.logits) for row in driver.rows])

    texts, logits = run(target.backend.make_ops())

    def work(group: RankGroup) -> tuple[bool, list[list[int]], npt.NDArray[np.float32]]:
        ops = joined(target, group)
        return ops.parallel.gathers, *run(ops)

    ranks = on_ranks(2, work, make=transported(transport))
    np.testing.assert_array_equal(ranks[0][2], ranks[1][2])
    if ranks[0][0]:
        np.testing.assert_array_equal(ranks[0][2], logits)
    if ranks[0][0] or target.exact:
        assert ranks[0][1] == texts
        np.testing.assert_allclose(ranks[0][2], logits, rtol=0, atol=5e-5)


def test_two_ranks_add_what_an_adapter_adds_on_one(target: Target, checkpoints: Path) -> None:
    """Each cuts it as it cuts the weights: two requests of different adapters and one of none."""
    path = target.checkpoint("llama-biases-wide-heads")
    if path is None:
        lacks("it reads no checkpoint")
    folders = [write_adapter(path, checkpoints / f"of-ranks-{seed}", seed=seed, rank=1 + seed) for seed in (1, 2)]
    with open_checkpoint(path) as checkpoint:
        linears = spec_of(checkpoint).adaptable()
    adapters = [read_adapter(folder, linears, 6) for folder in folders]

    def run(ops: Ops) -> tuple[bool, npt.NDArray[np.float32]]:
        model = target.cls(target.config()).load_model(path, ops, lambda *_: None)
        assert isinstance(model, AdaptableModel)
        driver = PagedDriver(model.with_adapters(adapters), ops, PROMPTS, 64, places=[2, 0, 1])
        driver.generate(8, 5)
        return ops.parallel.gathers, np.concatenate([np.stack(row.logits) for row in driver.rows])

    _, alone = run(target.backend.make_ops())
    ranks = on_ranks(2, lambda group: run(joined(target, group)))
    (gathers, first), (_, second) = ranks
    np.testing.assert_array_equal(first, second)
    if gathers:
        np.testing.assert_array_equal(first, alone)
    elif target.exact:
        np.testing.assert_allclose(first, alone, rtol=0, atol=1e-4)
