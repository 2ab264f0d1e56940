"""Metadata that are optional, or that older and other converters write: read as llama.cpp does, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.errors import ModelError
from fd_core.models.families.spec import AttentionSpec
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import spec_of
from tests.models.loading.tiny_gguf import LLAMA, llama_tensors, write_gguf

FREQUENCIES = 10000.0 ** -(np.arange(0, 8, 2) / 8)
FACTORS = np.array([1, 2, 3, 4], "f4")


def _open(path: Path, values: dict[str, Any], tensors: dict[str, Any] | None = None, arch: str = "llama") -> Checkpoint:
    return open_checkpoint(
        write_gguf(path / "m.gguf", arch=arch, values=LLAMA | values, tensors=llama_tensors() | (tensors or {}))
    )


def _attention(checkpoint: Checkpoint) -> AttentionSpec:
    found = spec_of(checkpoint).layers[0].attention
    assert isinstance(found, AttentionSpec)
    return found


@pytest.mark.parametrize(
    ("values", "tensors", "divisor"),
    [
        ({"rope.scaling.factor": 4.0}, {}, 4),
        ({"rope.scale_linear": 4.0}, {}, 4),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, {}, 4),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, {}, 2),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, 1),
        ({"rope.scaling.type": "linear"}, {}, 1),
        ({"rope.scaling.factor": 0.0}, {}, 1),
        ({}, {"rope_freqs.weight": FACTORS}, FACTORS),
        ({"rope.scaling.factor": 4.0}, {"rope_freqs.weight": FACTORS}, 4 * FACTORS),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_freqs.weight": FACTORS}, FACTORS),
    ],
)
def test_rope_is_scaled_as_by_llama_cpp(
    tmp_path: Path, values: dict[str, Any], tensors: dict[str, Any], divisor: Any
) -> None:
    rope = _attention(_open(tmp_path, values, tensors)).rope
    np.testing.assert_allclose(rope.inverse_frequencies, FREQUENCIES / divisor, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "tensors", "message"),
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {"rope_freqs.weight": FACTORS}, "'yarn' with"),
        ({"rope.scaling.attn_factor": 1.5}, {}, r"llama\.rope\.scaling\.attn_factor is 1\.5"),
        ({"attention.causal": False}, {}, r"llama\.attention\.causal is false"),
    ],
)
def test_metadata_that_cannot_be_followed_are_refused(
    tmp_path: Path, values: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=rf"m\.gguf: .*{message}"):
        _open(tmp_path, values, tensors)


@pytest.mark.parametrize("rotates", [None, True, False])
def test_granite_has_rope_unless_it_is_switched_off(tmp_path: Path, rotates: bool | None) -> None:
    values: dict[str, Any] = {"logit_scale": 2.0} | ({} if rotates is None else {"rope.scaling.finetuned": rotates})
    rope = _attention(_open(tmp_path, values, arch="granite")).rope
    np.testing.assert_allclose(rope.inverse_frequencies, 0 if rotates is False else FREQUENCIES)


def test_granite_without_a_scale_of_scores_uses_the_head_size(tmp_path: Path) -> None:
    assert _attention(_open(tmp_path, {"logit_scale": 2.0}, arch="granite")).scale == 8**-0.5


@pytest.mark.parametrize(
    ("arch", "pattern", "slides"),
    [
        ("gemma2", None, [1, 0, 1, 0]),
        ("gemma3", None, [1, 1, 1, 1]),
        ("gemma3", 3, [1, 1, 0, 1]),
        ("gemma3", [False, True, False, True], [0, 1, 0, 1]),
        ("cohere2", None, [1, 1, 1, 0]),
        ("cohere2", 2, [1, 0, 1, 0]),
        ("cohere2", 1, [0, 0, 0, 0]),
        ("gpt-oss", 0, [1, 1, 1, 1]),
        ("exaone4", 2, [1, 0, 1, 0]),
    ],
)
def test_layers_with_a_window_are_listed_or_counted(tmp_path: Path, arch: str, pattern: Any, slides: list[int]) -> None:
    values = {"block_count": 4, "attention.sliding_window": 7, "logit_scale": 1.0, "expert_count": 2}
    values |= {"expert_used_count": 1, **({} if pattern is None else {"attention.sliding_window_pattern": pattern})}
    config = _open(tmp_path, values, arch=arch).config
    assert (config["sliding_window"], config["layer_types"]) == (
        7,
        ["sliding_attention" if each else "full_attention" for each in slides],
    )


@pytest.mark.parametrize("pattern", [[True], "1", True])
def test_pattern_of_windows_of_another_form_is_refused(tmp_path: Path, pattern: Any) -> None:
    values = {"block_count": 4, "attention.sliding_window": 7, "attention.sliding_window_pattern": pattern}
    with pytest.raises(ModelError, match=r"gemma3\.attention\.sliding_window_pattern must list 4 layers, or be an"):
        _open(tmp_path, values, arch="gemma3")


@pytest.mark.parametrize(
    ("kind", "method"), [(None, None), (0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, ""), (True, ""), (9, "")]
)
def test_pooling_is_that_of_the_file(tmp_path: Path, kind: Any, method: str | None) -> None:
    checkpoint = _open(tmp_path, {} if kind is None else {"pooling_type": kind})
    if method == "":
        with pytest.raises(ModelError, match=rf"m\.gguf: llama\.pooling_type is {kind}; supported are 0 \(unset\), 1"):
            _ = checkpoint.pooling
    else:
        assert checkpoint.pooling == method


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
def test_equal_values_of_each_layer_are_one(tmp_path: Path, key: str) -> None:
    layers = {"block_count": 2}
    listed = _open(tmp_path, {**layers, key: [LLAMA[key]] * 2}).config
    assert listed == _open(tmp_path, layers).config
    with pytest.raises(ModelError, match=rf"m\.gguf: llama\.{key} differs between layers: \[4, 2\]"):
        _open(tmp_path, {**layers, key: [4, 2]})
    with pytest.raises(ModelError, match=rf"m\.gguf: llama\.{key} must be an integer, or list one for each of 2"):
        _open(tmp_path, {**layers, key: [2]})


@pytest.mark.parametrize(
    ("arch", "values", "message"),
    [
        ("llama", {"context_length": 1}, "llama.context_length must exceed 1; it is 1"),
        (
            "cohere2",
            {"rope.dimension_count": 4},
            "cohere2.rope.dimension_count rotates 4 of 8 elements of a head, but",
        ),
        (
            "ernie4_5-moe",
            {"leading_dense_block_count": 10**6},
            "ernie4_5-moe.leading_dense_block_count is 1000000, but",
        ),
    ],
)
def test_refusals_name_keys_of_the_file(tmp_path: Path, arch: str, values: dict[str, Any], message: str) -> None:
    usual = {
        "attention.sliding_window": 7,
        "logit_scale": 1.0,
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": 16,
    }
    with pytest.raises(ModelError, match=re.escape(f"m.gguf: {message}")):
        spec_of(_open(tmp_path, usual | values, arch=arch))
