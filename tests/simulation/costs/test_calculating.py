"""Profiles calculated from device specifications."""

from __future__ import annotations

import pytest

from fd_core.simulation.costs.calculating import ACCELERATORS, ARCHITECTURES
from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.costs.profile import Costs
from tests.simulation.costs.plans import Row, decodes, plan_of


def seconds(name: str, *, rows: int = 1, context: int = 100) -> float:
    return Costs(profile_named(name)).step(decodes(rows, context))


BILLIONS = {
    "llama-8b": 8.03,
    "llama-70b": 70.6,
    "llama-1b": 1.24,
    "qwen2.5-7b": 7.62,
    "qwen3-30b-a3b": 30.5,
    "smollm2": 0.135,
}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_parameter_counts_match_published_ones(name: str, billions: float) -> None:
    assert ARCHITECTURES[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_single_row_decode_is_bound_by_weight_reads() -> None:
    read = 2 * (8.03e9 - 128256 * 4096) / 3.35e12  # one row of the embedding is looked up; the rest is not read
    assert read < seconds("h100:llama-8b:bandwidth=1") < 1.25 * read


def test_long_prefill_is_compute_bound() -> None:
    operations = 2 * 8192 * (8.03e9 - 2 * 128256 * 4096) / 989.4e12
    profile = profile_named("h100:llama-8b:compute=1,attention=1")
    assert operations < Costs(profile).step(plan_of(Row(0, tokens=8192))) < 1.4 * operations


def test_batch_reads_weights_once() -> None:
    assert seconds("h100:llama-8b", rows=32) < 1.2 * seconds("h100:llama-8b", rows=1)


def test_context_costs_its_kv_reads() -> None:
    longer = seconds("h100:llama-8b", rows=64, context=4100) - seconds("h100:llama-8b", rows=64, context=100)
    assert longer == pytest.approx(64 * 4000 * 131072 / (0.85 * 3.35e12), rel=0.05)


def test_ranks_split_compute_but_add_collectives() -> None:
    two, eight = seconds("h200:llama-70b:tp=2"), seconds("h200:llama-70b:tp=8")
    assert two / 4 < eight < two / 2


def test_collective_cost_scales_with_tokens_and_bandwidth() -> None:
    chunk = plan_of(Row(0, tokens=8192, samples=False))
    fast, slow = (profile_named(f"h100:llama-70b:tp=8,link={share}") for share in (0.9, 0.1))
    extra = Costs(slow).step(chunk) - Costs(fast).step(chunk)
    moved = 2 * 80 * 2 * 7 / 8 * 8192 * 8192 * 2 / 450e9
    assert extra == pytest.approx(moved * (1 / 0.1 - 1 / 0.9), rel=0.01)


def test_few_tokens_read_few_experts_only() -> None:
    one, many = seconds("h100:qwen3-30b-a3b"), seconds("h100:qwen3-30b-a3b", rows=64)
    assert one < 0.3 * many
    assert many < seconds("h100:qwen3-30b-a3b", rows=256) < 1.5 * many


def test_smaller_kv_dtype_fits_more_blocks() -> None:
    wide, narrow = profile_named("h100:llama-8b"), profile_named("h100:llama-8b:kv=fp8")
    assert narrow.bytes_per_block * 2 == wide.bytes_per_block
    assert narrow.limits.num_kv_blocks == pytest.approx(2 * wide.limits.num_kv_blocks, abs=2)


def test_indivisible_kv_heads_are_replicated() -> None:
    # Four KV heads on eight ranks: each rank holds one.
    four, eight = (profile_named(f"h100:qwen3-30b-a3b:tp={n}").model.kv_bytes_per_token for n in (4, 8))
    assert eight == 2 * four


@pytest.mark.parametrize("device", ACCELERATORS)
@pytest.mark.parametrize("model", ["llama-1b", "smollm2"])
def test_each_device_has_a_labelled_profile(device: str, model: str) -> None:
    profile = profile_named(f"{device}:{model}")
    assert profile.label.endswith("(calculated, never measured)")
    assert profile.error == ()
    assert any("datasheet" in note or "NOTES.md" in note for note in profile.notes)
    assert "never measured" in profile.notes[0]
