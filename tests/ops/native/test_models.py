"""Architectures on the native kernels, with recorded and replayed forwards, in bfloat16 and with packed weights."""

import numpy as np
import pytest

from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy.ops import NumpyOps
from tests.models.paged import PagedDriver
from tests.models.tiny import CASES

LENGTHS = (1, 23, 8, 11)


def run(checkpoint_folder, ops, chunk=None, generated=24, lengths=LENGTHS, quantization="auto"):
    with open_checkpoint(checkpoint_folder) as checkpoint:
        model = load_model(checkpoint, ops, 128, quantization=quantization)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in lengths]
    driver = PagedDriver(model, ops, prompts, 128)
    driver.generate(generated, chunk)
    return driver.rows


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_near_float32(tiny, native, case):
    for row in run(tiny(case).folder, native("bfloat16"), generated=1):
        expected = tiny(case).logits(row.tokens[:-1])
        error = np.abs(np.stack(row.logits) - expected)
        assert error.mean() < 0.05 * expected.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3-moe", "gemma3", "ernie-moe"])
def test_packed_weights_are_close_to_dequantized_ones(tiny, native, case, dtype):
    folder = tiny(case).folder
    found, expected = (
        np.concatenate([np.stack(row.logits) for row in run(folder, ops, generated=1, quantization="int8")])
        for ops in (native(dtype), NumpyOps())
    )
    # Uses the median, since some tokens are routed to another expert where two score almost equally.
    assert np.median(np.abs(found - expected)) < 0.04 * expected.std()


@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen3-moe", "gemma3"])
def test_row_is_bitwise_equal_alone_batched_and_chunked(tiny, native, case, dtype, quantization):
    folder, ops = tiny(case).folder, native(dtype)
    together = run(folder, ops, quantization=quantization)
    for chunk in (5, 1):
        for row, other in zip(run(folder, ops, chunk, quantization=quantization), together, strict=True):
            assert row.tokens == other.tokens
            np.testing.assert_array_equal(np.stack(row.logits), np.stack(other.logits))
    alone = run(folder, ops, lengths=LENGTHS[:1], quantization=quantization)[0]
    np.testing.assert_array_equal(np.stack(alone.logits), np.stack(together[0].logits))
