"""Models with latent KV beyond the kit of families: refusals, published formats, adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.errors import ConfigError, ModelError
from fd_core.models.families.latent.deepseek import DeepSeekV2, DeepSeekV3
from fd_core.models.loading.config import ModelConfig
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import describe, load_model, spec_of
from fd_core.ops.contract import Ops
from fd_core.ops.native import load_native_ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.parallel import RankGroup
from fd_core.ops.weights import FP8
from fd_core.testing.kit.ranks import expert_parallel, on_ranks, shared_memory_ranks
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.testing.models.families import gguf_files
from fd_core.testing.models.paged import PagedDriver

V3 = {**SIZES, **DeepSeekV3.defaults, **DeepSeekV3.cases["experts"], "architectures": list(DeepSeekV3.architectures)}


BLOCKS = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "moe_intermediate_size": 132,
    "q_lora_rank": 129,
    "kv_lora_rank": 136,
    "v_head_dim": 35,
}
"""Sizes of several blocks of 128, the last of which is cut off; the halves of two ranks begin inside of a block."""


def logits(folder: Path, ops: Ops | None = None) -> np.ndarray:
    ops = ops or NumpyOps()
    with open_checkpoint(folder) as checkpoint:
        driver = PagedDriver(load_model(checkpoint, ops), ops, [tuple(range(9))], 32)
    driver.generate(3)
    return np.stack(driver.rows[0].logits)


def write_fp8(config: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint with FP8 projections, and the same values in float32; each block of 128 x 128 has a scale."""
    import torch
    from safetensors.torch import save_file

    plain, packed = folder / "plain", folder / "packed"
    wide, stored = {}, {}
    for name, values in write_config(config, plain, seed=1).items():
        wide[name] = stored[name] = torch.from_numpy(values)
        if "proj" in name:
            down, across = (-(-size // 128) for size in values.shape)
            scales = wide[name].abs().max() / 448 * torch.linspace(1, 3, down * across).reshape(down, across)
            each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: values.shape[0], : values.shape[1]]
            stored[name] = (wide[name] / each).to(torch.float8_e4m3fn)
            wide[name] = stored[name].float() * each
            stored[f"{name}_scale_inv"] = scales
    packed.mkdir()
    form = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(wide, plain / "model.safetensors", metadata={"format": "pt"})
    return plain, packed


def write_gguf_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Write a checkpoint; return also the metadata and the tensors of its GGUF file."""
    parts: list[Any] = []
    write_config(V3, folder, seed=1)
    with monkeypatch.context() as patched, open_checkpoint(folder) as original:
        patched.setattr(gguf_files, "write_gguf", lambda *written: parts.extend(written[2:]))
        config = {**V3, "model_type": "deepseek_v3"}
        gguf_files.convert(original, "deepseek2", DeepSeekV3.gguf["deepseek2"], config, folder)
    return folder, dict(parts[0]), dict(parts[1])


def test_gguf_files_of_all_ages_are_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2025, keys and values were in one tensor, and the sizes of heads had the usual names."""
    folder, metadata, tensors = write_gguf_parts(tmp_path, monkeypatch)
    new = gguf_files.write_gguf(tmp_path / "new.gguf", "deepseek2", metadata, tensors)
    for side in ("key", "value"):
        metadata[f"deepseek2.attention.{side}_length"] = metadata.pop(f"deepseek2.attention.{side}_length_mla")
    with open_checkpoint(folder) as original:
        for name in [each for each in tensors if "attn_k_b" in each]:
            del tensors[name], tensors[name.replace("k_b", "v_b")]
            up = original.read(f"model.layers.{name.split('.')[1]}.self_attn.kv_b_proj.weight")
            tensors[name.replace("k_b", "kv_b")] = up.to_float32()
    old = gguf_files.write_gguf(tmp_path / "old.gguf", "deepseek2", metadata, tensors)
    np.testing.assert_allclose(logits(new), logits(folder), atol=1e-5)
    np.testing.assert_array_equal(logits(old), logits(new))


def test_a_file_without_its_gating_function_has_that_of_its_correction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, metadata, tensors = write_gguf_parts(tmp_path, monkeypatch)
    del metadata["deepseek2.expert_gating_func"]
    file = gguf_files.write_gguf(tmp_path / "m.gguf", "deepseek2", metadata, tensors)
    np.testing.assert_allclose(logits(file), logits(folder), atol=1e-5)


def test_quantized_parts_of_latent_attention_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 12}
    monkeypatch.setitem(globals(), "V3", V3 | sizes)
    _, metadata, tensors = write_gguf_parts(tmp_path, monkeypatch)
    packed, wide = dict(tensors), dict(tensors)
    for name in [each for each in tensors if "_b.weight" in each and "attn_q" not in each]:
        values = gguf.quants.quantize(tensors[name], gguf.GGMLQuantizationType.Q8_0)
        packed[name] = values, gguf.GGMLQuantizationType.Q8_0
        wide[name] = gguf.quants.dequantize(values, gguf.GGMLQuantizationType.Q8_0)
    files = [
        gguf_files.write_gguf(tmp_path / f"{len(each)}-{each is packed}.gguf", "deepseek2", metadata, each)
        for each in (packed, wide)
    ]
    np.testing.assert_array_equal(*map(logits, files))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_gating_func", 3, "expert_gating_func is 3; supported are 1 and 2"),
        ("attention.temperature_scale", 0.1, "queries scaled by position are not supported"),
        ("attention.kv_lora_rank", None, "attention.kv_lora_rank"),
        ("attn_v_b", None, r"shape \(4, 24, 12\) and attn_v_b of shape \(\) do not fit"),
    ],
)
def test_unsupported_gguf_files_are_refused_by_name(
    key: str, value: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, metadata, tensors = write_gguf_parts(tmp_path, monkeypatch)
    if value is not None:
        metadata[f"deepseek2.{key}"] = value
    elif metadata.pop(f"deepseek2.{key}", None) is None:
        del tensors[f"blk.0.{key}.weight"]
    path = gguf_files.write_gguf(tmp_path / "model.gguf", "deepseek2", metadata, tensors)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(path)


def test_pack_without_latent_attention_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(V3, tmp_path, seed=1)
    monkeypatch.setattr(NumpyOps, "latents", False)
    with pytest.raises(ConfigError, match=r"the numpy pack does not compute latent attention.*DeepseekV3ForCausalLM"):
        logits(tmp_path)


def test_fp8_blocks_as_published_are_read(tmp_path: Path) -> None:
    """`kv_b_proj` is dequantized, because it is applied from both sides; the others stay packed."""
    plain, packed = write_fp8(V3, tmp_path)
    np.testing.assert_allclose(logits(packed), logits(plain), atol=1e-5)
    with open_checkpoint(packed) as checkpoint:
        uses = load_model(checkpoint, NumpyOps()).weights
        spec = spec_of(checkpoint)
    expanded = sum(use.parameters for use in uses if use.stored == FP8 and use.computed != FP8)
    assert expanded == sum(layer.attention.latent.up.outs[0] * 24 for layer in spec.layers)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "make", [shared_memory_ranks, expert_parallel(shared_memory_ranks)], ids=["cut", "whole experts"]
)
@pytest.mark.parametrize("pack", [NumpyOps, partial(load_native_ops, "float32", 1)])
def test_fp8_blocks_are_divided_among_ranks(tmp_path: Path, pack: Callable[[], Ops], make: Any) -> None:
    plain, packed = write_fp8(V3 | BLOCKS, tmp_path)

    def work(group: RankGroup) -> np.ndarray:
        ops = pack()
        ops.join(group)
        return logits(packed, ops)

    alone, expected = logits(packed, pack()), logits(plain, pack())
    for found in [alone, *on_ranks(2, work, make=make)]:
        np.testing.assert_allclose(found, expected, atol=1e-4)
        np.testing.assert_array_equal(found.argmax(axis=1), alone.argmax(axis=1))


def test_adapters_change_the_linears_before_latent_values() -> None:
    names = {name.rpartition(".")[2] for name in describe(ModelConfig(V3)).adaptable()}
    assert names == {"q_a_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (DeepSeekV2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (DeepSeekV2, {"norm_topk_prob": True}, "norm_topk_prob is set"),
        (DeepSeekV3, {"q_lora_rank": None, "attention_bias": True}, "only with a q_lora_rank"),
    ],
)
def test_unknown_forms_are_refused(family: type[DeepSeekV2], changes: dict[str, object], words: str) -> None:
    config = {
        **SIZES,
        **family.defaults,
        **family.cases["one-linear" if family is DeepSeekV2 else "experts"],
        **changes,
    }
    with pytest.raises(ModelError, match=words):
        describe(ModelConfig({**config, "architectures": list(family.architectures)}))
