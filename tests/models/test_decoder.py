"""Every architecture compared with transformers: logits of every position and greedy tokens."""

import numpy as np
import pytest

from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.torch.ops import TorchOps
from tests.models.paged import PagedDriver
from tests.models.tiny import CASES
from tests.ops.packs import PACKS

GENERATED = 64


def prompts_of_several_lengths(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab, length).tolist() for length in (1, 23, 8, 11)]


def run(checkpoint_folder, ops, chunk):
    with open_checkpoint(checkpoint_folder) as checkpoint:
        model = load_model(checkpoint, ops, 128)
    driver = PagedDriver(model, ops, prompts_of_several_lengths(model.vocab_size), 128)
    driver.generate(GENERATED, chunk)
    return driver.rows


@pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "chunked"])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("case", CASES)
def test_float32_equals_transformers(tiny, case, pack, chunk):
    rows = run(tiny(case).folder, PACKS[pack](), chunk)
    for row in rows:
        expected = tiny(case).logits(row.tokens[:-1])
        assert np.abs(expected).max() > 1  # the logits must differ for the comparison to mean anything
        np.testing.assert_allclose(np.stack(row.logits), expected, rtol=0, atol=1e-4)
        assert len(row.generated) == GENERATED
        # Each token is the reference's choice after the preceding ones, so the reference generates the same text.
        assert row.generated == expected[row.prompt_len - 1 :].argmax(axis=1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_near_float32(tiny, case):
    ops = TorchOps("bfloat16")
    with open_checkpoint(tiny(case).folder) as checkpoint:
        model = load_model(checkpoint, ops, 64)
    driver = PagedDriver(model, ops, prompts_of_several_lengths(model.vocab_size), 64)
    driver.generate(1)
    for row in driver.rows:
        expected = tiny(case).logits(row.tokens[:-1])
        error = np.abs(np.stack(row.logits) - expected)
        assert error.mean() < 0.05 * expected.std()
