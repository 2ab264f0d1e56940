"""Every architecture in bfloat16, compared with transformers; the kit for families compares float32."""

import numpy as np
import pytest

from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.torch.ops import TorchOps
from tests.models.paged import PagedDriver
from tests.models.tiny import CASES


def prompts_of_several_lengths(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab, length).tolist() for length in (1, 23, 8, 11)]


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
