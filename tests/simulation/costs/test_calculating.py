"""Profiles that are calculated from a device's numbers."""

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
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert ARCHITECTURES[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_decode_of_one_row_is_bound_by_reading_the_weights() -> None:
    read = 2 * (8.03e9 - 128256 * 4096) / 3.35e12  # the embedding is looked up, not read
    assert read < seconds("h100:llama-8b:bandwidth=1") < 1.25 * read


def test_a_long_prompt_is_bound_by_multiplying() -> None:
    operations = 2 * 8192 * (8.03e9 - 2 * 128256 * 4096) / 989.4e12
    profile = profile_named("h100:llama-8b:compute=1,attention=1")
    assert operations < Costs(profile).step(plan_of(Row(0, tokens=8192))) < 1.4 * operations


def test_batches_share_the_weights() -> None:
    assert seconds("h100:llama-8b", rows=32) < 1.2 * seconds("h100:llama-8b", rows=1)


def test_a_context_costs_the_reading_of_its_kv() -> None:
    longer = seconds("h100:llama-8b", rows=64, context=4100) - seconds("h100:llama-8b", rows=64, context=100)
    assert longer == pytest.approx(64 * 4000 * 131072 / (0.85 * 3.35e12), rel=0.05)


def test_ranks_share_a_step_but_wait_for_each_other() -> None:
    two, eight = seconds("h200:llama-70b:tp=2"), seconds("h200:llama-70b:tp=8")
    assert two / 4 < eight < two / 2


def test_collectives_grow_with_tokens_and_fall_with_the_link() -> None:
    chunk = plan_of(Row(0, tokens=8192, samples=False))
    fast, slow = (profile_named(f"h100:llama-70b:tp=8,link={share}") for share in (0.9, 0.1))
    extra = Costs(slow).step(chunk) - Costs(fast).step(chunk)
    moved = 2 * 80 * 2 * 7 / 8 * 8192 * 8192 * 2 / 450e9
    assert extra == pytest.approx(moved * (1 / 0.1 - 1 / 0.9), rel=0.01)


def test_few_tokens_read_few_experts() -> None:
    one, many = seconds("h100:qwen3-30b-a3b"), seconds("h100:qwen3-30b-a3b", rows=64)
    assert one < 0.3 * many
    assert many < seconds("h100:qwen3-30b-a3b", rows=256) < 1.5 * many


def test_small_kv_leaves_room_for_more_blocks() -> None:
    wide, narrow = profile_named("h100:llama-8b"), profile_named("h100:llama-8b:kv=fp8")
    assert narrow.bytes_per_block * 2 == wide.bytes_per_block
    assert narrow.limits.num_kv_blocks == pytest.approx(2 * wide.limits.num_kv_blocks, abs=2)


def test_heads_that_do_not_divide_are_kept_twice() -> None:
    # Four heads of keys and values on eight ranks: each rank keeps one.
    four, eight = (profile_named(f"h100:qwen3-30b-a3b:tp={n}").model.kv_bytes_per_token for n in (4, 8))
    assert eight == 2 * four


@pytest.mark.parametrize("device", ACCELERATORS)
@pytest.mark.parametrize("model", ["llama-1b", "smollm2"])
def test_each_device_has_a_profile_that_says_what_it_is(device: str, model: str) -> None:
    profile = profile_named(f"{device}:{model}")
    assert profile.label.endswith("(calculated, never measured)")
    assert profile.error == ()
    assert any("datasheet" in note or "NOTES.md" in note for note in profile.notes)
    assert "never measured" in profile.notes[0]
