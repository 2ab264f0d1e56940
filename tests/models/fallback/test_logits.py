"""Models that `transformers` computes over paged KV have the logits of `transformers` alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fd_core.testing.models.paged import PagedDriver
from tests.models.fallback.written import GROUPED, MODELS, load, logits_of, prompts, write


def compare(folder: Path, reference: object, chunk: int | None, *, states: bool = False, **settings: object) -> None:
    model, ops = load(folder, **settings)
    driver = PagedDriver(model, ops, prompts(30, 17), longest=34, states=states)
    driver.generate(3, chunk)
    for row in driver.rows:
        right = logits_of(reference, row.tokens[: row.computed])
        np.testing.assert_allclose(np.stack(row.logits), right, atol=1e-4)


SIMILAR = ("Apertus", "Arcee", "Olmo", "Persimmon", "Phi")
"""Models whose attention, cache and positions are those of others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in SIMILAR else ()) for name in MODELS]
)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    reference = write(name, tmp_path)
    compare(tmp_path, reference, None)
    compare(tmp_path, reference, 7, native_kernels=True)


@pytest.mark.parametrize("native", [False, True])
def test_projected_states_equal_logits(tmp_path: Path, native: bool) -> None:
    compare(tmp_path, write("Cohere", tmp_path), 5, states=True, native_kernels=native)


def test_layers_with_and_without_window(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = GROUPED | {"num_hidden_layers": 3, "layer_types": types, "sliding_window": 4}
    compare(tmp_path, write("Ministral", tmp_path, **fields), 7)
    model, _ = load(tmp_path)
    assert [call.heads.window for call in model.calls.recorded] == [4, None, 4]


def test_model_describes_itself(tmp_path: Path) -> None:
    reference = write("GPTJ", tmp_path)
    model, _ = load(tmp_path, max_model_len=100)
    shape = model.kv_shape(16)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_size) == (2, 4, 8, 16)
    assert (model.vocab_size, model.max_positions, model.state_size, model.eos_token_ids) == (97, 100, 32, (2,))
    assert model.num_parameters == sum(each.numel() for each in reference.parameters())
    [use] = model.weights
    assert (use.stored, use.computed, use.parameters) == ("F32", "float32", model.num_parameters)


def test_logits_in_bfloat16_are_close(tmp_path: Path) -> None:
    reference = write("Helium", tmp_path)
    model, ops = load(tmp_path, dtype="bfloat16")
    driver = PagedDriver(model, ops, prompts(20), longest=24)
    driver.generate(1, 6)
    right = logits_of(reference, driver.rows[0].tokens[:20])
    off = np.linalg.norm(np.stack(driver.rows[0].logits) - right) / np.linalg.norm(right)
    assert 0 < off < 0.05
