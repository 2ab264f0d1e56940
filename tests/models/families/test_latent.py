"""Models with latent KV beyond the kit of families: refusals, published formats, adapters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fd_core.errors import ConfigError, ModelError
from fd_core.models.families.latent.deepseek import DeepSeekV2, DeepSeekV3
from fd_core.models.loading.config import ModelConfig
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import describe, load_model, spec_of
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import FP8
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.testing.models.paged import PagedDriver

V3 = {**SIZES, **DeepSeekV3.defaults, **DeepSeekV3.cases["experts"], "architectures": list(DeepSeekV3.architectures)}


def logits(folder: Path) -> np.ndarray:
    ops = NumpyOps()
    with open_checkpoint(folder) as checkpoint:
        driver = PagedDriver(load_model(checkpoint, ops), ops, [tuple(range(9))], 32)
    driver.generate(3)
    return np.stack(driver.rows[0].logits)


def test_pack_without_latent_attention_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(V3, tmp_path, seed=1)
    monkeypatch.setattr(NumpyOps, "latents", False)
    with pytest.raises(ConfigError, match=r"the numpy pack does not compute latent attention.*DeepseekV3ForCausalLM"):
        logits(tmp_path)


def test_fp8_blocks_as_published_are_read(tmp_path: Path) -> None:
    """`kv_b_proj` is dequantized, because it is applied from both sides; the others stay packed."""
    import torch
    from safetensors.torch import save_file

    plain, packed = tmp_path / "plain", tmp_path / "packed"
    stored = {}
    for name, values in write_config(V3, plain, seed=1).items():
        stored[name] = torch.from_numpy(values)
        if "proj" in name:
            scale = stored[name].abs().max() / 448
            stored[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
    packed.mkdir()
    form = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (packed / "config.json").write_text(json.dumps(V3 | {"quantization_config": form}))
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        scale = stored.pop(name)
        stored[name.removesuffix("_scale_inv")] = stored[name.removesuffix("_scale_inv")].float() * scale
    save_file(stored, plain / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_allclose(logits(packed), logits(plain), atol=1e-5)
    with open_checkpoint(packed) as checkpoint:
        uses = load_model(checkpoint, NumpyOps()).weights
        spec = spec_of(checkpoint)
    expanded = sum(use.parameters for use in uses if use.stored == FP8 and use.computed != FP8)
    assert expanded == sum(layer.attention.latent.up.outs[0] * 24 for layer in spec.layers)  # type: ignore[union-attr]


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
