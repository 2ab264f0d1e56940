"""Sharded models compute the same as one rank, and no rank holds whole weights."""

from functools import partial

import numpy as np
import pytest

from fd_core.errors import ConfigError
from fd_core.models.decoder import Moe, adapters_bytes
from fd_core.models.families.installed import installed_families
from fd_core.models.families.spec import head_shares, require_division, width_share
from fd_core.models.loading.adapter import read_adapter
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model, spec_of
from fd_core.ops.native import load_native_ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.parallel import Parallel
from fd_core.ops.torch.ops import TorchOps
from fd_core.ops.weights import PackedTensor
from fd_core.testing.kit.ranks import expert_parallel, on_ranks, shared_memory_ranks
from fd_core.testing.models import checkpoints
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.arrays import packed_weight
from fd_core.testing.models.checkpoints import write_checkpoint
from tests.models.paged import PagedDriver

NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
PROMPTS = [[3], list(range(7, 30)), [11, 5, 159, 5]]
GENERATED = 12


def run(folder, ops, quantization="auto", adapters=()):
    with open_checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, ops, 64, quantization=quantization)
        linears = spec_of(checkpoint).adaptable()
    if adapters:
        model = model.with_adapters([read_adapter(adapter, linears, 8) for adapter in adapters])
    driver = PagedDriver(model, ops, PROMPTS, 64, places=[2, 0, 1] if adapters else None)
    driver.generate(GENERATED, 5)
    return [row.generated for row in driver.rows], np.concatenate([np.stack(row.logits) for row in driver.rows])


def run_on_ranks(folder, make_ops, size, *how, make=shared_memory_ranks):
    def work(group):
        ops = make_ops()
        ops.join(group)
        return run(folder, ops, *how)

    return on_ranks(size, work, make=make)


def checked(folder, make_ops, size, *how, atol=2e-5, make=shared_memory_ranks):
    texts, logits = run(folder, make_ops(), *how)
    ranks = run_on_ranks(folder, make_ops, size, *how, make=make)
    for rank_texts, rank_logits in ranks:
        assert rank_texts == texts
        np.testing.assert_array_equal(rank_logits, ranks[0][1])  # bitwise equal
        np.testing.assert_allclose(rank_logits, logits, rtol=0, atol=atol)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("pack", [NumpyOps, TorchOps, partial(load_native_ops, "float32", 1)])
@pytest.mark.parametrize("name", ["olmo2", "qwen2_moe", "llama4_text"])
@pytest.mark.in_turn(4)
def test_joint_norms_and_experts_of_all_kinds_span_the_ranks(name, pack, size, tmp_path, monkeypatch):
    """Four ranks hold two KV heads: each counts twice in the sum of squares and in its width."""
    case = next(each.cases["plain"] for each in installed_families().architectures.values() if each.model_type == name)
    monkeypatch.setitem(checkpoints.CASES, name, (name, case))
    checked(write_checkpoint(name, tmp_path / "model"), pack, size, atol=5e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("pack", [NumpyOps, TorchOps])
@pytest.mark.parametrize("name", ["qwen2_moe", "llama4_text", "gpt_oss"])
def test_ranks_divide_experts_of_all_kinds(name, pack, size, tmp_path, monkeypatch):
    """Uneven numbers, in one tensor or in several, with biases, and with shared experts."""
    case = next(each.cases["plain"] for each in installed_families().architectures.values() if each.model_type == name)
    monkeypatch.setitem(checkpoints.CASES, name, (name, case))
    folder = write_checkpoint(name, tmp_path / "model")
    checked(folder, pack, size, atol=5e-5, make=expert_parallel(shared_memory_ranks))


@pytest.mark.parametrize("form", ["auto", "int4"])
def test_each_rank_reads_only_its_experts(form, tmp_path):
    """Of five experts, one rank reads and counts three, another one the others; rank 0 counts all that is shared."""
    folder = write_checkpoint("qwen3-moe", tmp_path / "model", num_experts=5)

    def work(group):
        ops = NumpyOps()
        ops.join(group)
        with open_checkpoint(folder) as checkpoint:
            model = load_model(checkpoint, ops, 64, quantization=form)
        blocks = [layer.feed_forward for layer in model.decoder.layers]
        held = [block.experts for block in blocks if isinstance(block, Moe)]
        return sum(use.parameters for use in model.weights), [(each.first, len(each.gate_up)) for each in held]

    with open_checkpoint(folder) as checkpoint:
        whole = sum(use.parameters for use in load_model(checkpoint, NumpyOps(), 64, quantization=form).weights)
        experts = spec_of(checkpoint).layers[-1].feed_forward.experts
    expert = sum(sum(linear.outs) * linear.ins for linear in experts[0])
    (one, held), (other, others) = on_ranks(2, work, make=expert_parallel(shared_memory_ranks))
    assert held == [(0, 3)] * len(held) and others == [(3, 2)] * len(held)
    assert other == 2 * expert * len(held) and one + other == whole


@pytest.mark.parametrize(
    ("case", "sizes", "ranks", "words", "hint"),
    [
        ("llama", {}, 2, "LlamaForCausalLM has no experts", "omit it"),
        ("qwen3-moe", {"num_experts": 3, "num_experts_per_tok": 2}, 4, "3 experts among 4 ranks", "use 2"),
    ],
)
def test_model_whose_experts_cannot_be_divided_is_rejected(case, sizes, ranks, words, hint, tmp_path):
    with open_checkpoint(write_checkpoint(case, tmp_path / "model", **sizes)) as checkpoint:
        spec = spec_of(checkpoint)
    with pytest.raises(ConfigError, match=words) as refused:
        require_division(spec, ranks, 1, expert_parallel=True)
    assert (refused.value.field, refused.value.hint) == ("--enable-expert-parallel", hint)


def test_pack_without_expert_parallelism_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(NumpyOps, "expert_parallel", False)
    folder = write_checkpoint("qwen3-moe", tmp_path / "model")
    with pytest.raises(ConfigError, match="numpy pack does not compute experts of some ranks"):
        checked(folder, NumpyOps, 2, make=expert_parallel(shared_memory_ranks))


@pytest.mark.parametrize("targets", [None, ("k_proj", "o_proj", "up_proj"), ("q_proj", "v_proj", "down_proj")])
@pytest.mark.parametrize("pack", [NumpyOps, TorchOps])
def test_adapters_are_sharded_like_the_weights(pack, targets, tmp_path):
    folder = write_checkpoint("llama", tmp_path / "model", **NINE_HEADS)
    adapters = [
        write_adapter(folder, tmp_path / str(seed), seed=seed, rank=2 + seed, targets=targets) for seed in (1, 2)
    ]
    checked(folder, pack, 2, "auto", adapters, atol=5e-5)


def test_rank_budgets_only_its_share_of_adapters(tmp_path):
    with open_checkpoint(write_checkpoint("llama", tmp_path / "model", **NINE_HEADS)) as checkpoint:
        spec = spec_of(checkpoint)
    whole, first, last = (adapters_bytes(spec, 3, 16, 4, Parallel(*rank)) for rank in ((0, 1), (0, 3), (2, 3)))
    assert first == last
    assert whole / 3 < first < whole / 1.5  # one matrix of each adapter is not sharded


@pytest.mark.parametrize("size", [2, 3, 9])
def test_uneven_and_replicated_heads_are_supported(size, tmp_path):
    checked(write_checkpoint("llama", tmp_path / "model", **NINE_HEADS), NumpyOps, size)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_weights_shard_to_the_same_values(form, tmp_path):
    checked(write_checkpoint("llama", tmp_path / "model"), NumpyOps, 2, form)


@pytest.mark.parametrize(
    ("case", "sizes", "ranks", "words", "hint"),
    [
        ("llama", NINE_HEADS, 4, r"9 query heads and 3 KV heads among 4 ranks", "use 2, 3 or 9"),
        ("llama", NINE_HEADS | {"intermediate_size": 7}, 9, "block of width 7 among 9 ranks", "use 2 or 3"),
        ("qwen3-moe", {"moe_intermediate_size": 1}, 2, "block of width 1 among 2 ranks", "omit it"),
    ],
)
def test_indivisible_model_is_rejected_with_valid_sizes(case, sizes, ranks, words, hint, tmp_path):
    with open_checkpoint(write_checkpoint(case, tmp_path / "model", **sizes)) as checkpoint:
        spec = spec_of(checkpoint)
    with pytest.raises(ConfigError, match=words) as refused:
        require_division(spec, ranks, 1)
    assert refused.value.hint == hint


def test_query_heads_and_columns_are_partitioned(tmp_path):
    with open_checkpoint(write_checkpoint("llama", tmp_path / "model", **NINE_HEADS)) as checkpoint:
        attention = spec_of(checkpoint).layers[0].attention
    for size in (2, 3, 9):
        shares = [head_shares(attention, Parallel(rank, size)) for rank in range(size)]
        assert [head for queries, _ in shares for head in range(9)[queries]] == list(range(9))
        for queries, kv in shares:  # a rank has the KV heads of its query heads
            assert sorted({head // 3 for head in range(9)[queries]}) == list(range(3)[kv])
    for width, size in ((1536, 2), (96, 2), (96, 5), (100, 3), (7, 7)):
        shares = [width_share(width, Parallel(rank, size)) for rank in range(size)]
        assert [column for share in shares for column in range(width)[share]] == list(range(width))


@pytest.mark.parametrize("columns", [slice(0, 64), slice(64, 96), slice(48, 96), slice(5, 12)])
@pytest.mark.parametrize("group", [32, 96])
def test_column_slices_of_packed_weights_keep_their_values(columns, group):
    rng = np.random.default_rng(3)
    values = rng.integers(0, 16, (8, 96)).astype(np.int8)
    scales, minima = (rng.normal(size=(8, 96 // group)).astype(np.float32) for _ in range(2))
    whole = PackedTensor("Q4_1", 4, values, scales, minima)
    np.testing.assert_array_equal(whole.take_columns(columns).to_float32(), whole.to_float32()[:, columns])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "int8"])
def test_reordered_columns_of_packed_weights_keep_their_values(name):
    whole = packed_weight(name, 8, 512)
    found, order = whole.order_columns(np.array([2, 0, 3, 1]), 128), np.arange(512).reshape(4, 128)[[2, 0, 3, 1]]
    np.testing.assert_array_equal(found.to_float32(), whole.to_float32()[:, order.ravel()])
