"""Several ranks, as threads, and stages: sums and gathers, and models with the same results as on one rank.

A pack with `Parallel.gathers` has the bits of one rank, in every dtype and quantization. Others need not, and the
engine logs a warning at start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from fd_core.ops.contract import Norm, Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.parallel import RankGroup, Stage
from fd_core.testing.axes.parts import KitCase, supported_by
from fd_core.testing.axes.ranks import SUMS, joined
from fd_core.testing.kit.ranks import gloo_ranks, on_ranks, shared_memory_ranks
from fd_core.testing.kit.target import Target
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.arrays import Values, assert_near, assert_same, heads_on
from fd_core.testing.models.checkpoints import abilities_of
from fd_core.testing.models.paged import PagedDriver, Row
from fd_core.testing.suite.test_models import ADAPTED_ERROR, adapted_by, assert_close, loaded, oracle_logits, written

REQUIRES = ("primitives",)

_SHAPES: Final = ((1, 576), (33, 70), (0, 16), (2051, 1031))
PROMPTS = [[3], list(range(7, 30)), [11, 5, 159, 5]]


def transported(transport: str) -> Callable[[int, float], Sequence[RankGroup]]:
    if transport == "shared_memory":
        return shared_memory_ranks
    pytest.importorskip("torch")
    return gloo_ranks


@pytest.mark.parametrize(
    ("size", "transport", "shape"),
    [
        *product((2,), ["shared_memory"], _SHAPES),
        *product((3,), ["gloo"], _SHAPES),
        *product((5, 8, 17), ["shared_memory"], _SHAPES[:2]),
    ],
)
def test_sums_and_gathers_have_the_same_bits_on_all_ranks(
    target: Target, size: int, transport: str, shape: tuple[int, int]
) -> None:
    """Sums are in the order of ranks, so a row's result does not depend on the batch; all are in float32."""
    parts = [Values(seed=rank)(*shape) * np.float32(1.1) for rank in range(size)]

    whole, kinds = np.concatenate(parts, axis=1), "joint_norms" not in target.limits
    right = NumpyOps().joint_norm(whole[:, None], Norm(np.ones_like(whole[:1]), 1e-5), whole.shape[1])

    def work(group: RankGroup) -> tuple[npt.NDArray[Any], ...]:
        ops, own = joined(target, group), parts[group.parallel.rank]
        mine = ops.from_host(own)
        exchanged = [exchange(mine) for exchange in (ops.all_reduce, ops.all_gather)]
        for exchange in (ops.all_reduce, ops.all_gather):  # each result is in new memory
            exchange(ops.from_host(2 * own))
        results = [ops.to_host(each).copy() for each in exchanged]
        if kinds and len(own):
            norm = Norm(ops.prepare_vector(np.ones_like(own[:1])), 1e-5)
            found = ops.joint_norm(heads_on(ops, own[:, None])[0], norm, size * shape[1])
            results.append(np.array(ops.to_host(found), np.float32)[:, 0])
        return tuple(results)

    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    results = on_ranks(size, work, make=transported(transport))
    for reduced, gathered, *_ in results:
        assert_same(reduced, total)
        assert_same(gathered, whole)
    for normed in zip(*(each[2:] for each in results), strict=True):
        assert_near(target.ops, target.ops.from_host(np.concatenate(normed, axis=1)), right[:, 0])


@pytest.mark.fd_cases(SUMS)
def test_sums(target: Target, case: KitCase) -> None:
    case.with_only(supported_by(target.ops, target.limits)).check(target, f"fdcore conformance {target}")


def check_ranks(
    target: Target, path: Path, size: int, transport: str = "shared_memory", adapters: Sequence[Path] = ()
) -> None:
    """Compare the logits of several ranks with the oracle's, also where they continue from the KV of one rank."""
    places = [2, 0, 1] if adapters else None

    def run(ops: Ops, kv: npt.NDArray[Any] | None = None, rows: Sequence[Row] = ()) -> tuple[PagedDriver, list[Row]]:
        model = loaded(target, ops, path)
        model = adapted_by(model, path, adapters) if adapters else model
        driver = PagedDriver(model, ops, PROMPTS, 64, kv_dtype=target.kv_dtype, places=places)
        driver.generate(6, 5)
        before = deepcopy(driver.rows)
        if kv is not None:
            shape = driver.cache.shape
            heads = slice(shape.first_kv_head, shape.first_kv_head + shape.num_kv_heads)
            driver.cache.import_blocks(np.arange(len(kv), dtype=np.int32), kv[..., heads, :])
            driver.rows = deepcopy(list(rows))
        driver.generate(8)
        return driver, before

    alone, rows = run(target.backend.make_ops())
    kv = alone.cache.export_blocks(np.arange(alone.cache.num_blocks, dtype=np.int32))
    ranks = on_ranks(size, lambda group: run(joined(target, group), kv, rows), make=transported(transport))
    ones, firsts, *others = ([*before, *driver.rows] for driver, before in ((alone, rows), *ranks))
    for index, (row, one) in enumerate(zip(firsts, ones, strict=True)):
        for other in others:
            assert_same(other[index].logits, row.logits)
        if ranks[0][0].ops.parallel.gathers:
            assert_same(row.logits, one.logits)
        # Rounded sums of partial products may route a token to other experts.
        if target.exact or "moe" not in path.name:
            adapter = None if places is None else (None, *adapters)[places[index % len(places)]]
            expected = oracle_logits(path, tuple(row.tokens[:-1]), target.quantization, adapter, target.kv_dtype)
            assert_close(target, row, expected, largest=ADAPTED_ERROR, share=2.0)


@pytest.mark.parametrize(
    ("case", "size", "transport", "adapters", "kv_dtype"),
    [
        ("llama-biases-wide-heads", 2, "shared_memory", 2, "auto"),
        ("llama-linear-rope", 3, "gloo", 0, "int8"),
        ("qwen3-moe", 4, "shared_memory", 0, "auto"),
        ("gemma3", 4, "shared_memory", 0, "auto"),
        ("ernie-moe", 2, "gloo", 0, "fp8"),
    ],
)
def test_ranks_compute_what_the_oracle_computes(
    target: Target,
    checkpoints: Path,
    require: Callable[..., None],
    case: str,
    size: int,
    transport: str,
    adapters: int,
    kv_dtype: str,
) -> None:
    """Shard adapters as weights: with two, one of the requests has none. KV is in 8 bits if the pack stores it so."""
    require("checkpoints", "kv_transfer", *abilities_of(case))
    if kv_dtype in target.ops.kv_dtypes:
        target = target.changed(kv_cache_dtype=kv_dtype)
    path = written(case, checkpoints)
    folders = [write_adapter(path, checkpoints / f"of-ranks-{seed}", seed=seed, rank=1 + seed) for seed in (1, 2)]
    check_ranks(target, path, size, transport, folders[:adapters])


@pytest.mark.parametrize("states", [False, True], ids=["forward", "states"])
@pytest.mark.parametrize(("case", "count"), [("llama-biases-wide-heads", 2), ("gemma3", 3)])
def test_stages_compute_what_the_oracle_computes(
    target: Target, checkpoints: Path, require: Callable[..., None], case: str, count: int, states: bool
) -> None:
    """Pass the states of each step from stage to stage."""
    require("checkpoints", *abilities_of(case))
    path, driver = written(case, checkpoints), None
    for stage in (Stage(index, count) for index in range(count)):
        ops = joined(target, stage)
        last = states and stage.last
        driver = PagedDriver(loaded(target, ops, path), ops, PROMPTS, 64, states=last, stage_before=driver)
    assert driver is not None
    driver.generate(8, 5)
    for row in driver.rows:
        assert_close(target, row, oracle_logits(path, tuple(row.tokens[:-1]), target.quantization))
