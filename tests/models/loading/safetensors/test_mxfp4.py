"""Experts of gpt-oss as they are published: blocks of codes, and exponents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fd_core.errors import ModelError
from fd_core.models.families.builtin.experts import GptOss
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import FP4_HALVES, MXFP4, PackedTensor
from fd_core.testing.models.checkpoints import SIZES, write_config
from tests.models.paged import PagedDriver

CODES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""Value of each code, as in the specification of OCP microscaling formats."""
EXPERTS = "model.layers.0.mlp.experts"
Written = tuple[Path, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write a model in float32, and return its folder with the tensors of the same model in MXFP4."""
    folder, rng = tmp_path_factory.mktemp("float"), np.random.default_rng(2)
    fields = {**SIZES, **GptOss.cases["plain"], "num_hidden_layers": 2}
    write_config({**fields, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, folder, 3)
    tensors, packed = load_file(folder / "model.safetensors"), {}
    for name, values in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = values
            continue
        count, width, out = values.shape
        blocks = rng.integers(0, 256, (count, out, width // 32, 16), np.uint8)
        scales = rng.integers(122, 126, (count, out, width // 32), np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(count, out, -1, 32)
        whole = np.array(CODES)[nibbles] * 2.0 ** (scales.astype(float)[..., None] - 127)
        tensors[name] = whole.reshape(count, out, width).swapaxes(1, 2).astype(np.float32).copy()
    save_file(tensors, folder / "model.safetensors")
    return folder, packed


def write(folder: Path, written: Written, tensors: dict[str, np.ndarray]) -> Path:
    config = json.loads((written[0] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(folder: Path, ops: Any) -> list[np.ndarray]:
    with open_checkpoint(folder) as checkpoint:
        driver = PagedDriver(load_model(checkpoint, ops, 64), ops, [[3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]], 64)
    driver.generate(4)
    return list(driver.rows[0].logits)


def test_packed_experts_are_those_of_the_float_checkpoint(tmp_path: Path, written: Written) -> None:
    folder = write(tmp_path, written, written[1])
    with open_checkpoint(folder) as checkpoint:
        weight = checkpoint.read_weight(f"{EXPERTS}.4.up_proj.weight", {MXFP4})
        assert checkpoint.stored_format(f"{EXPERTS}.4.up_proj.weight") == MXFP4
    assert isinstance(weight, PackedTensor) and weight.nbytes == weight.values.size // 2 + 2 * weight.scales.size
    for found, expected in zip(logits(folder, NumpyOps()), logits(written[0], NumpyOps()), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_those_that_the_pack_stores(
    bits: int, tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumpyOps, "dequantizes_weights", False)
    monkeypatch.setattr(NumpyOps, "stores_tightly", bits == 4)
    with open_checkpoint(write(tmp_path, written, written[1])) as checkpoint:
        (use,) = [use for use in load_model(checkpoint, NumpyOps(), 64).weights if use.computed == MXFP4]
    assert use.nbytes == use.parameters * bits // 8 + use.parameters // 32 * 2


def test_codes_are_halves_of_the_stored_integers() -> None:
    np.testing.assert_array_equal(FP4_HALVES / 2, CODES)


@pytest.mark.parametrize(
    ("kind", "change", "error"),
    [
        ("gate_up_proj_scales", lambda scales: np.full_like(scales, 255), "scales that are not finite"),
        ("down_proj_scales", lambda scales: scales[:, :-1].copy(), r"has shape .*, expected"),
        ("down_proj_blocks", lambda blocks: blocks[..., :8].copy(), "16 bytes of each"),
        ("down_proj_bias", lambda bias: bias[:-1].copy(), r"has shape .*, expected"),
    ],
)
def test_damaged_experts_are_rejected_by_name(
    tmp_path: Path, written: Written, kind: str, change: Any, error: str
) -> None:
    name = f"{EXPERTS}.{kind}"
    folder = write(tmp_path, written, written[1] | {name: change(written[1][name])})
    with pytest.raises(ModelError, match=rf"'{name}' .*{error}"), open_checkpoint(folder) as checkpoint:
        load_model(checkpoint, NumpyOps(), 64)
