"""Format in which weights reach a pack, and how it is reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from fd_core.errors import ModelError
from fd_core.models.families.builtin.cohere import Cohere2
from fd_core.models.families.builtin.ernie import Ernie
from fd_core.models.families.builtin.layer_norms import StarCoder2
from fd_core.models.families.contract import Family
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.contract import Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.torch.ops import TorchOps
from fd_core.ops.weights import PackedTensor, RawTensor, Weight, WeightUse
from fd_core.testing.models.checkpoints import SIZES, write_config
from tests.models.loading.tiny_gguf import LLAMA, llama_tensors, write_gguf


class PartlyPacked(NumpyOps):
    """Pack that supports Q8_0 natively, and records its inputs."""

    weight_formats = frozenset({"Q8_0"})
    dequantizes_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[str]] = []

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Any:
        self.given.append([part.format if isinstance(part, PackedTensor) else part.dtype for part in parts])
        return super().prepare_linear(parts, biases, gated=gated)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Write a file as converters do: types differ between tensors."""
    kinds = {"token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "ffn_down": "Q8_0"}
    tensors: dict[str, Any] = llama_tensors()
    for name, values in tensors.items():
        kind = kinds.get(name.removesuffix(".weight").removeprefix("blk.0."))
        if kind is not None:
            quantization = GGMLQuantizationType[kind]
            tensors[name] = gguf.quants.quantize(values, quantization), quantization
    return write_gguf(tmp_path / "mixed.gguf", tensors=tensors)


def test_weights_are_dequantized_only_if_the_pack_needs_it(mixed: Path) -> None:
    ops = PartlyPacked()
    with open_checkpoint(mixed) as checkpoint:
        model = load_model(checkpoint, ops, 64)
    head, *layer = ops.given
    assert (head, layer) == (["Q8_0"], [["F32", "F32", "Q8_0"], ["F32"], ["F32", "F32"], ["Q8_0"]])
    # Q8_0 stores 32 values in 32 bytes plus a scale of 2 bytes; the projection shares the table.
    assert set(model.weights) == {
        WeightUse("F32", "float32", False, 1024 + 2 * 2048, 4 * (1024 + 2 * 2048)),
        WeightUse("Q8_0", "Q8_0", False, 512 + 2048, (512 + 2048) * 34 // 32),
        WeightUse("Q4_0", "float32", False, 1024 + 512, 4 * (1024 + 512)),
        WeightUse("Q8_0", "Q8_0", True, 1536, 1536 * 34 // 32),
    }


def test_memory_estimate_covers_dequantized_weights(mixed: Path) -> None:
    with open_checkpoint(mixed) as checkpoint:
        uses = load_model(checkpoint, NumpyOps(), 64).weights
    assert {use.computed for use in uses} == {"float32", "Q4_0", "Q8_0"}
    assert all(use.nbytes == (use.parameters * 34 // 32 if use.table else 4 * use.parameters) for use in uses)


class Quantizing(PartlyPacked):
    weight_formats = frozenset({"int8", "int4"})


@pytest.mark.parametrize(("requested", "linears"), [("int8", "int8"), ("int4", "int4")])
def test_linears_are_quantized_on_load(mixed: Path, requested: str, linears: str) -> None:
    """Including those stored in another format; the embedding stays, and the output projection uses 8 bits."""
    ops, seen = Quantizing(), []
    with open_checkpoint(mixed) as checkpoint:
        model = load_model(checkpoint, ops, 64, lambda done, total: seen.append((done, total)), requested)
        assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)
    head, *layer = ops.given
    assert (head, layer) == (["int8"], [[linears] * 3, [linears], [linears] * 2, [linears]])
    assert {(use.computed, use.table) for use in model.weights} == {
        (linears, False),
        ("int8", False),
        ("Q8_0", True),
    }
    heads = [(use.stored, use.parameters) for use in model.weights if use.computed == "int8"]
    assert requested == "int8" or heads == [("Q8_0", 1536)]


def test_unquantizable_weight_is_named(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["blk.0.ffn_up.weight"][3, 4] = np.nan
    path, tensor = (
        write_gguf(tmp_path / "nan.gguf", tensors=tensors),
        r"nan\.gguf: .*'model\.layers\.0\.mlp\.up_proj\.weight'",
    )
    with open_checkpoint(path) as checkpoint, pytest.raises(ModelError, match=rf"{tensor}.*finite"):
        load_model(checkpoint, Quantizing(), 64, quantization="int8")


class OnlyLooksUp(PartlyPacked):
    weight_formats = frozenset()


@pytest.mark.parametrize("ops", [OnlyLooksUp(), TorchOps()])
def test_table_that_a_dequantized_projection_shares_is_dequantized(mixed: Path, ops: Ops) -> None:
    with open_checkpoint(mixed) as checkpoint:
        decoder = load_model(checkpoint, ops, 64).decoder
    assert decoder.head.weight is decoder.embedding


def test_packed_table_besides_a_separate_projection_stays_packed(tmp_path: Path) -> None:
    tensors: dict[str, Any] = llama_tensors()
    table = tensors["token_embd.weight"]
    tensors["output.weight"] = table
    quantized = gguf.quants.quantize(table, GGMLQuantizationType.Q4_1)
    tensors["token_embd.weight"] = quantized, GGMLQuantizationType.Q4_1
    with open_checkpoint(write_gguf(tmp_path / "untied.gguf", tensors=tensors)) as checkpoint:
        decoder = load_model(checkpoint, TorchOps(), 64).decoder
    assert isinstance(decoder.embedding, PackedTensor)
    assert np.array_equal(decoder.embedding.to_float32(), gguf.quants.dequantize(quantized, GGMLQuantizationType.Q4_1))


@pytest.mark.parametrize(("scale", "packed"), [(4.0, True), (3.0, False)])
def test_table_with_a_scale_stays_packed_if_no_product_rounds(tmp_path: Path, scale: float, packed: bool) -> None:
    values = {**LLAMA, "logit_scale": scale, "attention.scale": 0.3, "embedding_scale": 1.0, "residual_scale": 1.0}
    tensors: dict[str, Any] = llama_tensors()
    kind = GGMLQuantizationType.Q8_0
    tensors["token_embd.weight"] = gguf.quants.quantize(tensors["token_embd.weight"], kind), kind
    path = write_gguf(tmp_path / "scaled.gguf", arch="granite", values=values, tensors=tensors)
    with open_checkpoint(path) as checkpoint:
        table = load_model(checkpoint, NumpyOps(), 64).decoder.embedding
    expected = gguf.quants.dequantize(tensors["token_embd.weight"][0], kind) * np.float32(1 / scale)
    assert isinstance(table, PackedTensor) == packed
    assert np.array_equal(table.to_float32() if isinstance(table, PackedTensor) else table, expected)


@pytest.mark.parametrize(("family", "case"), [(Cohere2, "mixed"), (StarCoder2, "biases"), (Ernie, "biases")])
def test_table_with_a_scale_or_a_bias_is_held_once(family: type[Family], case: str, tmp_path: Path) -> None:
    write_config({**SIZES, **family.cases[case], "architectures": family.architectures[:1]}, tmp_path, seed=1)
    with open_checkpoint(tmp_path) as checkpoint:
        decoder = load_model(checkpoint, TorchOps(), 64).decoder
    assert decoder.head.weight is decoder.embedding
