"""Limits are fixed at start; an error names the contradicting settings with their values."""

from __future__ import annotations

import pytest

from fd_core.config import EngineConfig, Limits, SpeculativeConfig, resolve_limits
from fd_core.config.constraints import make_settings
from fd_core.errors import ConfigError


def limits(free_bytes: int = 10**9, image_tokens: tuple[int, int, bool] = (0, 1, False), **settings: object) -> Limits:
    return resolve_limits(
        EngineConfig(model="m", **settings),  # type: ignore[arg-type]
        model_max_len=2048,
        vocab_size=100,
        bytes_per_block=1000,
        free_bytes=free_bytes,
        image_tokens=image_tokens,
    )


def test_budget_holds_a_whole_image_besides_decodes() -> None:
    """A model whose images are computed in one step could wait for ever otherwise."""
    image = 3000, 4, True
    assert limits(image_tokens=image, max_num_seqs=8, structured_output=False).max_num_batched_tokens == 3007
    assert limits(image_tokens=(3000, 4, False), max_num_seqs=8).max_num_batched_tokens == 2048
    with pytest.raises(ConfigError, match="an image of 3000 tokens, which this model computes in one step, and 7"):
        limits(image_tokens=image, max_num_seqs=8, structured_output=False, max_num_batched_tokens=3006)


@pytest.mark.parametrize("word", ["awq", "gguf", "fp8"])
def test_unknown_quantization_lists_the_supported_ones(word: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word}' is not supported; use (auto|int8), which"):
        make_settings(EngineConfig, {"model": "x", "quantization": word})


def test_cache_never_exceeds_the_capacity_of_all_slots() -> None:
    assert limits(max_num_seqs=2, block_size=32).num_kv_blocks == 2 * 2048 // 32


def test_cache_uses_its_share_of_free_memory() -> None:
    assert limits(free_bytes=100_000, gpu_memory_utilization=0.5, max_model_len=32).num_kv_blocks == 32
    assert limits(free_bytes=30_000, gpu_memory_utilization=0.5, max_model_len=32).num_kv_blocks == 15


def test_default_length_shrinks_to_the_cache() -> None:
    assert limits(num_kv_blocks=10, block_size=32).max_model_len == 320


@pytest.mark.parametrize(
    ("settings", "field", "numbers"),
    [
        ({"max_model_len": 4096}, "--max-model-len", "2048"),
        ({"num_kv_blocks": 10**7}, "--num-kv-blocks", "10,000,000,000"),
        ({"num_kv_blocks": 10, "max_model_len": 1024}, "--num-kv-blocks", "320"),
        ({"kv_cache_memory": 2 * 10**9}, "--kv-cache-memory", "2,000,000,000"),
        ({"kv_cache_memory": 999}, "--kv-cache-memory", "1,000"),
    ],
)
def test_contradicting_settings_are_rejected(settings: dict[str, object], field: str, numbers: str) -> None:
    with pytest.raises(ConfigError, match=numbers) as caught:
        limits(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "budget"), [({}, 512), ({"max_num_seqs": 600}, 600), ({"max_num_batched_tokens": 64}, 64)]
)
def test_default_token_budget_is_the_backends_and_holds_all_decodes(settings: dict[str, object], budget: int) -> None:
    assert (
        resolve_limits(
            EngineConfig(model="m", **settings),  # type: ignore[arg-type]
            model_max_len=2048,
            vocab_size=100,
            bytes_per_block=1000,
            free_bytes=10**9,
            default_batched_tokens=512,
        ).max_num_batched_tokens
        == budget
    )


@pytest.mark.law("2.5")
def test_budget_below_one_decode_with_its_drafts_is_rejected() -> None:
    three = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert limits(speculative=three, max_num_batched_tokens=4).max_drafts == 3
    with pytest.raises(ConfigError, match="less than the 4 tokens"):
        limits(speculative=three, max_num_batched_tokens=3)


@pytest.mark.parametrize("count", [-1, 17])
def test_number_of_drafts_out_of_range_is_rejected(count: int) -> None:
    with pytest.raises(ConfigError, match="between 0 and 16"):
        limits(speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=count))
