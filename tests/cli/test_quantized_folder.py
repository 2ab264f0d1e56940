from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from fd_core.cli.models.quantized_folder import write_quantized
from fd_core.errors import ConfigError, ModelError
from fd_core.models.opening import open_checkpoint
from fd_core.models.quantization import quantized
from fd_core.models.registry import load_model, spec_of
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import WEIGHT_FORMATS, PackedTensor
from fd_core.testing.models.checkpoints import write_checkpoint

NAN = "model.layers.1.mlp.down_proj.weight"


def write(source: Path, form: str, folder: Path) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    with open_checkpoint(source) as checkpoint:
        write_quantized(checkpoint, form, folder, {"tokenizer.json": b"{}"}, lambda *each: seen.append(each))
        assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)
    return seen


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("case", ["llama", "qwen3-moe", "gemma3"])
def test_written_folder_equals_quantization_on_load(tmp_path: Path, case: str, form: str) -> None:
    (tmp_path / "source").mkdir()
    source, folder = write_checkpoint(case, tmp_path / "source"), tmp_path / "quantized"
    write(source, form, folder)
    with open_checkpoint(source) as before, open_checkpoint(folder) as after:
        spec = spec_of(before)
        linears = {f"{name}.weight" for linear in spec.linears() for name in linear.names}
        assert {name for name, _ in spec.tensors()} == set(after.names())
        for name in after.names():
            found = after.read_weight(name, WEIGHT_FORMATS)
            assert (after.stored_format(name) == form) == (name in linears)
            expected = quantized(before, name, form) if name in linears else before.read(name)
            if isinstance(expected, PackedTensor):
                assert isinstance(found, PackedTensor) and found.format == form
                np.testing.assert_array_equal(found.values, expected.values)
                np.testing.assert_array_equal(found.scales, expected.scales)
            np.testing.assert_array_equal(found.to_float32(), expected.to_float32())
        load_model(after, NumpyOps(), 64)


def test_bfloat16_makes_an_ordinary_folder_of_a_quantized_one(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    quantized_folder, plain = tmp_path / "quantized", tmp_path / "plain"
    write(write_checkpoint("llama", tmp_path / "source"), "int4", quantized_folder)
    write(quantized_folder, "bfloat16", plain)
    assert not {"quantization_config", "compression_config"} & {*json.loads((plain / "config.json").read_text())}
    with open_checkpoint(quantized_folder) as before, open_checkpoint(plain) as after:
        assert {*before.names()} == {*after.names()}
        for name in after.names():
            rounded = quantize(before.read(name).to_float32(), GGMLQuantizationType.BF16).view(np.uint16)
            assert after.read(name).dtype == "BF16"
            np.testing.assert_array_equal(after.read(name).data, rounded.reshape(after.read(name).shape))


def test_file_is_readable_by_the_library(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write(write_checkpoint("llama", tmp_path / "source"), "int4", tmp_path / "quantized")
    name = "model.layers.0.mlp.down_proj"
    with safe_open(tmp_path / "quantized" / "model.safetensors", "numpy") as tensors:
        assert tensors.get_tensor(f"{name}.weight_packed").dtype == np.int32
        assert tensors.get_tensor(f"{name}.weight_shape").tolist() == [64, 96]
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert (tmp_path / "quantized" / "tokenizer.json").read_bytes() == b"{}"


def test_failed_write_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = write_checkpoint("llama", tmp_path / "source")
    weights = source / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {NAN: np.full(tensors[NAN].shape, np.nan, np.float32)}, weights)
    with pytest.raises(ModelError, match="finite"):
        write(source, "int8", tmp_path / "quantized")
    assert [each.name for each in tmp_path.iterdir()] == ["source"]
    (tmp_path / "quantized").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        write(source, "int8", tmp_path / "quantized")
    with pytest.raises(ConfigError, match="cannot write to"):
        write(source, "int8", tmp_path / "absent" / "quantized")
