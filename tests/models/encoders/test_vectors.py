"""Vectors of encoders equal those of transformers, and do not depend on the batch."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core import LLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.encoders.small import CONFIGS, pooled_by, states_of, written  # noqa: E402

LENGTHS = (1, 7, 200, 64, 130, 2, 33)
PACKS: dict[str, dict[str, Any]] = {
    "numpy": {"backend": "reference"},
    "native": {"backend": "cpu"},
    "torch": {"backend": "cpu", "native_kernels": False},
}


def prompts() -> list[list[int]]:
    """Return texts of token ids of uneven lengths."""
    rng = np.random.default_rng(7)
    return [rng.integers(5, 300, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_equal_transformers(tmp_path: Path, name: str, pack: str) -> None:
    model = written(tmp_path, name)
    pooled_by(tmp_path, "cls_token" if name == "roberta" else "mean_tokens")
    states = [states_of(model, ids) for ids in prompts()]
    right = [(each[0] if name == "roberta" else each.mean(0)).numpy() for each in states]
    with closing(LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=256, **PACKS[pack])) as llm:
        found = llm.embed(prompts())
        np.testing.assert_allclose(found, right, atol=1e-5)
        if pack == "native":
            np.testing.assert_array_equal(found, np.concatenate([llm.embed([each]) for each in prompts()]))
