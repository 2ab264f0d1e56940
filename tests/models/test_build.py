"""In which form weights reach a pack, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf.constants import GGMLQuantizationType

from fd_core.models.loading.checkpoint import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy_ops import NumpyOps
from fd_core.weights import PackedTensor, RawTensor, Weight, WeightUse
from tests.models.loading.tiny_gguf import llama_tensors, write_gguf


class PartlyPacked(NumpyOps):
    """A pack that computes Q8_0 as it is, and keeps what it was given."""

    weight_formats = frozenset({"Q8_0"})
    expands_weights = False

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
    """A file as converters write them: types differ from tensor to tensor."""
    kinds = {"token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "ffn_down": "Q8_0"}
    tensors: dict[str, Any] = llama_tensors()
    for name, values in tensors.items():
        kind = kinds.get(name.removesuffix(".weight").removeprefix("blk.0."))
        if kind is not None:
            quantization = GGMLQuantizationType[kind]
            tensors[name] = gguf.quants.quantize(values, quantization), quantization
    return write_gguf(tmp_path / "mixed.gguf", tensors=tensors)


def test_each_weight_is_expanded_only_where_the_pack_needs_it(mixed: Path) -> None:
    ops = PartlyPacked()
    with open_checkpoint(mixed) as checkpoint:
        model = load_model(checkpoint, ops, 64)
    assert ops.given == [["F32", "F32", "Q8_0"], ["F32"], ["F32", "F32"], ["Q8_0"]]
    # Of 32 values, Q8_0 keeps 32 bytes and a scale of 4 bytes.
    assert set(model.weights) == {
        WeightUse("F32", "float32", False, 1024 + 2 * 2048, 4 * (1024 + 2 * 2048)),
        WeightUse("Q8_0", "Q8_0", False, 1536 + 512 + 2048, (1536 + 512 + 2048) * 36 // 32),
        WeightUse("Q4_0", "float32", False, 1024 + 512, 4 * (1024 + 512)),
        WeightUse("Q8_0", "float32", True, 1536, 4 * 1536),
    }


def test_a_pack_that_expands_says_so(mixed: Path) -> None:
    with open_checkpoint(mixed) as checkpoint:
        uses = load_model(checkpoint, NumpyOps(), 64).weights
    assert {use.computed for use in uses} == {"float32"}
    assert {use.stored for use in uses} == {"F32", "Q4_0", "Q8_0"}
