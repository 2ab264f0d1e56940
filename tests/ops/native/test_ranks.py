"""Ranks on the native kernels: bitwise equal to one rank, for any weights and any division."""

import numpy as np
import pytest

from fd_core.models.loading.adapter import read_adapter
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model, spec_of
from fd_core.ops.native.pack import NativeOps
from fd_core.ops.parallel import RankExchangeError
from fd_core.testing.kit.ranks import expert_parallel, gloo_ranks, on_ranks, shared_memory_ranks
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.arrays import packed_weight
from fd_core.testing.models.checkpoints import write_checkpoint
from tests.models.paged import PagedDriver

CASES = ("llama-biases-wide-heads", "qwen3-moe", "gemma3", "ernie-moe")
PROMPTS = [[3], list(range(7, 30)), [11, 5, 159, 5]]


WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Sizes whose shares start inside the groups of 128 of some formats."""


def run(folder, ops, adapters=(), kind=None, quantization="auto"):
    """Generate with a model whose linears are, with a `kind`, random ones of that format."""
    with open_checkpoint(folder) as checkpoint:
        if kind is not None:
            raw = checkpoint.read_weight
            checkpoint.read_weight = lambda name, formats: (
                packed_weight(kind, *checkpoint.shape(name), scale=0.2) if formats else raw(name, formats)
            )
        model = load_model(checkpoint, ops, 64, quantization=quantization)
        linears = spec_of(checkpoint).adaptable()
    if adapters:
        model = model.with_adapters([read_adapter(adapter, linears, 8) for adapter in adapters])
    driver = PagedDriver(model, ops, PROMPTS, 64, places=[2, 0, 1] if adapters else None)
    driver.generate(6, 5)
    return [row.generated for row in driver.rows], np.concatenate([np.stack(row.logits) for row in driver.rows])


def require_equal(folder, native, *sizes, dtype="float32", threads=1, make=shared_memory_ranks, **weights):
    """Compare texts and logits on several ranks with those on one, bitwise; return the logits."""
    one = native(dtype, threads)
    texts, logits = run(folder, one, **weights)

    def work(group):
        ops = NativeOps(one.runtime.library, dtype, threads)
        ops.join(group)
        return run(folder, ops, **weights)

    assert np.isfinite(logits).all() and logits.std() > 0.01
    for size in sizes:
        for found in on_ranks(size, work, make=make):
            assert found[0] == texts
            np.testing.assert_array_equal(found[1], logits)
    return logits


@pytest.mark.parametrize("kind", [None, *sorted(NativeOps.weight_formats)])
def test_ranks_are_bitwise_equal_to_one_in_every_format(kind, native, tmp_path):
    folder = write_checkpoint("llama", tmp_path / "model", **WIDE)
    require_equal(folder, native, *(2,) if kind else (2, 3, 4, 8), kind=kind)


@pytest.mark.parametrize("kind", [None, "Q4_K", "int8"])
def test_ranks_are_bitwise_equal_to_one_in_bfloat16(kind, native, tmp_path):
    folder = write_checkpoint("llama", tmp_path / "model", **WIDE)
    require_equal(folder, native, 2, 3, dtype="bfloat16", threads=2, kind=kind)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_are_bitwise_equal_in_every_architecture(case, dtype, quantization, native, tmp_path):
    folder = write_checkpoint(case, tmp_path / "model")
    require_equal(folder, native, 2, dtype=dtype, quantization=quantization)


@pytest.mark.parametrize("kind", [None, "MXFP4", "Q4_K", "int4"])
def test_ranks_that_divide_experts_are_bitwise_equal(kind, native, tmp_path):
    """Three ranks hold two, two and one of the experts."""
    sizes = WIDE | {"num_experts": 5, "moe_intermediate_size": 128}
    folder = write_checkpoint("qwen3-moe", tmp_path / "model", **sizes)
    require_equal(folder, native, 2 if kind else 3, make=expert_parallel(shared_memory_ranks), kind=kind, threads=2)


@pytest.mark.parametrize("make", [shared_memory_ranks, gloo_ranks])
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_ranks_that_divide_experts_share_the_others(quantization, make, native, tmp_path):
    folder = write_checkpoint("ernie-moe", tmp_path / "model")
    weights = {"dtype": "bfloat16", "quantization": quantization}
    require_equal(folder, native, 2, make=expert_parallel(make), **weights)


def test_ranks_without_shared_memory_are_bitwise_equal_to_one(native, tmp_path):
    folder = write_checkpoint("qwen3-moe", tmp_path / "model")
    require_equal(folder, native, 2, make=gloo_ranks, quantization="int8")


def test_eager_ranks_are_bitwise_equal_to_one(native, tmp_path, monkeypatch):
    monkeypatch.setattr(NativeOps, "compile", lambda self, forward: forward)
    require_equal(write_checkpoint("gemma3", tmp_path / "model"), native, 2, quantization="int8")


@pytest.mark.parametrize("size", [2, 3])
def test_uneven_heads_and_vocabulary_are_supported(size, native, tmp_path):
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 162}
    require_equal(write_checkpoint("llama", tmp_path / "model", **sizes), native, size, threads=2)


@pytest.mark.parametrize(
    ("targets", "head_dim"),
    [
        (None, 8),
        (None, 16),
        (("k_proj", "o_proj", "up_proj"), 8),
        (("q_proj", "v_proj", "down_proj"), 8),
    ],
)
def test_adapters_are_sharded_like_the_weights(targets, head_dim, native, tmp_path):
    """Also where a rank's keys start in the middle of a vector."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": head_dim}
    folder = write_checkpoint("llama", tmp_path / "model", **sizes)
    adapters = [
        write_adapter(folder, tmp_path / str(seed), seed=seed, rank=2 + seed, targets=targets) for seed in (1, 2)
    ]
    adapted = require_equal(folder, native, 2, adapters=adapters)
    assert np.abs(adapted - run(folder, native())[1]).max() > 0.1, "the adapters change too little"


def test_missing_rank_is_named(native, tmp_path):
    library = native().runtime.library
    folder = write_checkpoint("llama", tmp_path / "model")

    def work(group):
        ops = NativeOps(library, "float32", 1)
        ops.join(group)
        with open_checkpoint(folder) as checkpoint:
            model = load_model(checkpoint, ops, 64)
        if group.parallel.rank == 0:
            PagedDriver(model, ops, PROMPTS, 64).generate(1, 5)

    with pytest.raises(RankExchangeError, match=r"rank 1 did not respond within 0\.3 s"):
        on_ranks(2, work, timeout=0.3)
