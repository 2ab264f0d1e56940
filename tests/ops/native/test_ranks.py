"""Ranks on the native kernels, whose fusions add up inside: what one rank computes, the same bits on all."""

import numpy as np
import pytest

from fd_core.models.loading.adapter import read_adapter
from fd_core.models.loading.checkpoint import open_checkpoint
from fd_core.models.registry import load_model, spec_of
from fd_core.ops.native.pack import NativeOps
from fd_core.ops.parallel import RanksApart
from fd_core.testing.adapters import EVERYTHING, write_adapter
from fd_core.testing.checkpoints import write_checkpoint
from fd_core.testing.ranks import on_ranks
from tests.models.paged import PagedDriver

CASES = ("llama-biases-wide-heads", "qwen3-moe", "gemma3", "ernie-moe")
PROMPTS = [[3], list(range(7, 30)), [11, 5, 159, 5]]


def run(folder, ops, adapters=()):
    with open_checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, ops, 64)
        linears = spec_of(checkpoint).adaptable()
    if adapters:
        model = model.with_adapters([read_adapter(adapter, linears, 8) for adapter in adapters])
    driver = PagedDriver(model, ops, PROMPTS, 64, places=[2, 0, 1] if adapters else None)
    driver.generate(12, 5)
    return [row.generated for row in driver.rows], np.concatenate([np.stack(row.logits) for row in driver.rows])


def compared(folder, native, size, threads=1, dtype="float32", adapters=()):
    """Run on one rank and on several; return the logits of both, the latter the same on all."""
    one = native(dtype, threads)

    def work(group):
        ops = NativeOps(one.runtime.library, dtype, threads)
        ops.join(group)
        return run(folder, ops, adapters)

    alone, ranks = run(folder, one, adapters), on_ranks(size, work)
    for texts, logits in ranks:
        assert texts == alone[0]
        np.testing.assert_array_equal(logits, ranks[0][1])
    return alone[1], ranks[0][1]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_does(case, native, tmp_path):
    alone, together = compared(write_checkpoint(case, tmp_path / case), native, 2)
    np.testing.assert_allclose(together, alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_heads_need_not_divide_evenly_nor_the_vocabulary_fill_vectors(size, native, tmp_path):
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 162}
    alone, together = compared(write_checkpoint("llama", tmp_path / "model", **sizes), native, size, threads=2)
    np.testing.assert_allclose(together, alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("targets", "head_dim"),
    [
        (EVERYTHING, 8),
        (EVERYTHING, 16),
        (("k_proj", "o_proj", "up_proj"), 8),
        (("q_proj", "v_proj", "down_proj"), 8),
    ],
)
def test_adapters_are_cut_as_the_weights_are(targets, head_dim, native, tmp_path):
    """Also where a rank's keys begin in the middle of a vector."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": head_dim}
    folder = write_checkpoint("llama", tmp_path / "model", **sizes)
    adapters = [
        write_adapter(folder, tmp_path / str(seed), seed=seed, rank=2 + seed, targets=targets) for seed in (1, 2)
    ]
    alone, together = compared(folder, native, 2, adapters=adapters)
    np.testing.assert_allclose(together, alone, rtol=0, atol=5e-5)
    assert np.abs(alone - compared(folder, native, 1)[0]).max() > 0.1, "the adapters change too little"


def test_a_rank_that_does_not_come_is_named(native, tmp_path):
    library = native().runtime.library
    folder = write_checkpoint("llama", tmp_path / "model")

    def work(group):
        ops = NativeOps(library, "float32", 1)
        ops.join(group)
        with open_checkpoint(folder) as checkpoint:
            model = load_model(checkpoint, ops, 64)
        if group.parallel.rank == 0:
            PagedDriver(model, ops, PROMPTS, 64).generate(1, 5)

    with pytest.raises(RanksApart, match=r"rank 1 was not heard of for 0\.3 s"):
        on_ranks(2, work, patience=0.3)
