"""Models of published sizes with random weights, made without a file: the values do not affect the time of a step."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.tokenizer_source import TokenizerSource
from fd_core.models.registry import describe
from fd_core.ops.weights import FP8, RawTensor, Weight
from fd_core.simulation.costs.calculating import ModelShape
from fd_core.testing.models.arrays import packed_weight

__all__ = ["RandomCheckpoint", "config_of"]

_SCALE = 0.02
_POOL = 1 << 22


def config_of(shape: ModelShape) -> dict[str, Any]:
    """Return the Hugging Face config.json of a model of these sizes, as Llama or Qwen3 with experts."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_model_len,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
    }
    if shape.experts:
        experts = {"num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
        config |= experts | {"moe_intermediate_size": shape.inner, "norm_topk_prob": True, "decoder_sparse_step": 1}
    return config


@cache
def _values(count: int) -> np.ndarray:
    pool = np.random.default_rng(0).standard_normal(min(count, _POOL), np.float32) * np.float32(_SCALE)
    return np.resize((pool.view(np.uint32) >> 16).astype(np.uint16), count)


@cache
def _packed(kind: str, out: int, inputs: int, group: int) -> Weight:
    return packed_weight(kind, out, inputs, group, scale=_SCALE)


class RandomCheckpoint(Checkpoint):
    """A checkpoint in no file: weights in bfloat16, those of layers in `form` if it is not `bf16`.

    Tensors of one size share their values; each becomes a separate weight on the device.
    """

    def __init__(self, shape: ModelShape, form: str = "bf16") -> None:
        """`form`: one of `roofline.FORMATS`; packed ones have a scale for 128 values."""
        super().__init__(Path(shape.title), config_of(shape), {}, ())
        self._shapes = dict(describe(ModelConfig(dict(self.config))).tensors())
        self._form = {"fp8": FP8}.get(form, form)

    def names(self) -> list[str]:
        """Return all tensors of the model."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the size that the model requests."""
        return self._shapes[name]

    def stored_format(self, name: str) -> str:
        """Return the result of `read_weight`."""
        return "BF16" if self._form == "bf16" else self._form

    def read(self, name: str) -> RawTensor:
        """Return random values, ones for a norm."""
        shape = self.shape(name)
        if len(shape) == 1:
            return RawTensor("F32", np.ones(shape, np.float32))
        return RawTensor("BF16", _values(int(np.prod(shape))).reshape(shape))

    def read_weight(self, name: str, formats: Collection[str]) -> Weight:
        """Return a weight in the requested format; the output projection stays bfloat16."""
        if self._form == "bf16" or name.startswith(("lm_head", "model.embed")):
            return self.read(name)
        out, inputs = self.shape(name)
        packed = _packed(self._form, out, inputs, min(128, inputs))
        return packed if self._form in formats else packed.expanded()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in bfloat16."""
        return sum(2 * int(np.prod(shape)) for shape in self._shapes.values())

    @property
    def tokenizer(self) -> TokenizerSource:
        """There is none."""
        raise NotImplementedError

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """None: nothing ends early."""
        return ()

    def _decoded(self, tensor: Any) -> Weight:
        raise NotImplementedError
