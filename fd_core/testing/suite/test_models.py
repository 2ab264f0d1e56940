"""Models: each architecture of the project, prompts whole, in chunks and mixed with decodes, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fd_core.backends.contract import AdaptableModel
from fd_core.models.loading.adapter import read_adapter
from fd_core.models.loading.checkpoint import open_checkpoint
from fd_core.models.registry import load_model, spec_of
from fd_core.ops.contract import Ops
from fd_core.ops.numpy_ops import NumpyOps
from fd_core.testing.adapters import merge_adapter, write_adapter
from fd_core.testing.checkpoints import CASES, abilities_of, write_checkpoint
from fd_core.testing.golden import MARGIN
from fd_core.testing.paged import PagedDriver, Row
from fd_core.testing.requirements import thorough_but
from fd_core.testing.target import Target

REQUIRES = ("checkpoints",)

LOGITS_ERROR = {"float32": 1e-4, "bfloat16": 4.0}
"""Largest error of a logit by dtype: bfloat16 may send a token on the verge to another expert; logits deviate by 4."""
MEAN_ERROR = {"float32": 2e-5, "bfloat16": 0.05}
"""Mean error as a share of that deviation."""

Logits = npt.NDArray[np.float32]
WAYS = {
    "whole": (None, (1, 23, 8, 11)),
    "chunked": (5, (1, 23, 8, 11)),
    "mixed": (3, (4, 27, 2, 9)),
    "alone": (None, (13,)),
}
GENERATED = 6


def prompts(vocab: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


@cache
def oracle_logits(case: str, folder: Path, tokens: tuple[int, ...]) -> Logits:
    """Return the oracle's logits of every position of one sequence by itself."""
    with open_checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, NumpyOps(), 64)
    driver = PagedDriver(model, NumpyOps(), [list(tokens)], 64)
    driver.step([(0, len(tokens))])
    return np.stack(driver.rows[0].logits)


def written(case: str, checkpoints: Path) -> Path:
    """Return the folder of a checkpoint, written at the first call."""
    folder = checkpoints / case
    if not (folder / "model.safetensors").exists():
        write_checkpoint(case, folder)
    return folder


ADAPTERS: dict[str, dict[str, Any]] = {
    "everything": {"seed": 1, "rank": 4},
    "queries": {"seed": 2, "rank": 6, "targets": ("q_proj", "v_proj")},
}
ADAPTED_ERROR = {"float32": 2e-4, "bfloat16": LOGITS_ERROR["bfloat16"]}
"""Largest error of a logit beside merged weights, which are rounded once more."""


@pytest.mark.parametrize("way", thorough_but(["mixed", "chunked"], "mixed"))
@pytest.mark.parametrize("case", thorough_but(["llama", "gemma3", "qwen3-moe"], "llama"))
def test_adapters_in_one_batch_compute_what_merged_weights_compute(
    target: Target, ops: Ops, checkpoints: Path, require: Callable[..., None], case: str, way: str
) -> None:
    require(*abilities_of(case))
    folder = written(case, checkpoints)
    merged = [folder]
    for name, settings in ADAPTERS.items():
        merged.append(checkpoints / f"{case}-{name}-merged")
        if not merged[-1].exists():
            merge_adapter(folder, write_adapter(folder, checkpoints / f"{case}-{name}", **settings), merged[-1])
    chunk, lengths = WAYS[way]
    model = type(target.backend)(target.config(max_model_len=64)).load_model(folder, ops, lambda *_: None)
    assert isinstance(model, AdaptableModel)
    with open_checkpoint(folder) as checkpoint:
        linears = spec_of(checkpoint).adaptable()
    adapted = model.with_adapters([read_adapter(checkpoints / f"{case}-{name}", linears, 6) for name in ADAPTERS])
    places = [2, 0, 1, 2][: len(lengths)]
    driver = PagedDriver(adapted, ops, prompts(model.vocab_size, lengths), 64, places=places)
    driver.generate(GENERATED, chunk)
    for row, place in zip(driver.rows, places, strict=True):
        expected = oracle_logits(case, merged[place], tuple(row.tokens[:-1]))
        error = np.abs(np.stack(row.logits) - expected)
        assert np.isfinite(error).all()
        assert error.max() < ADAPTED_ERROR[ops.dtype]
        assert error.mean() < 2 * MEAN_ERROR[ops.dtype] * expected.std()


def computed(target: Target, ops: Ops, folder: Path, way: str) -> list[Row]:
    """Generate greedily with what the backend loads from the checkpoint."""
    chunk, lengths = WAYS[way]
    config = target.config(max_model_len=64)
    model = type(target.backend)(config).load_model(folder, ops, lambda *_: None)
    driver = PagedDriver(model, ops, prompts(model.vocab_size, lengths), 64)
    driver.generate(GENERATED, chunk)
    return driver.rows


@pytest.mark.parametrize("way", thorough_but(WAYS, "whole", "mixed"))
@pytest.mark.parametrize("case", CASES)
def test_a_model_computes_what_the_oracle_computes(
    target: Target, ops: Ops, checkpoints: Path, require: Callable[..., None], case: str, way: str
) -> None:
    require(*abilities_of(case))
    folder = written(case, checkpoints)
    for row in computed(target, ops, folder, way):
        expected = oracle_logits(case, folder, tuple(row.tokens[:-1]))
        error = np.abs(np.stack(row.logits) - expected)
        assert np.isfinite(error).all()
        assert error.max() < LOGITS_ERROR[ops.dtype]
        assert error.mean() < MEAN_ERROR[ops.dtype] * expected.std()
        chosen = expected[row.prompt_len - 1 :]
        lead = chosen.max(axis=1) - chosen[np.arange(GENERATED), row.generated]
        assert lead.max() <= MARGIN[ops.dtype], "a greedy token is not the oracle's"
