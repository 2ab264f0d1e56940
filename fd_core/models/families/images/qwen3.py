"""Qwen3-VL: states of several layers of the encoder are added to the stream of the decoder (DeepStack)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Final

from fd_core.errors import ModelError
from fd_core.models.families.builtin.qwen import Qwen3, routed_experts
from fd_core.models.families.contract import (
    ImageSpec,
    LinearSpec,
    MergerSpec,
    MoeSpec,
    NormSpec,
    Traits,
    VectorSpec,
    gate_up_down,
    head_dim_of,
    rope_spec,
)
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.models.families.images.qwen import Qwen2Vl, QwenProcessor, turned
from fd_core.models.families.recurrent.qwen import Qwen35, Qwen35Moe
from fd_core.models.loading.config import ModelConfig

_NAMES: Final = {
    "model.norm": "visual.merger.norm",
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}

_VISION: Final = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "depth": 3,
    "num_heads": 4,
    "patch_size": 6,
    "num_position_embeddings": 25,
}


class Qwen3Vl(Qwen2Vl):
    """`Qwen3VLForConditionalGeneration`."""

    deep: tuple[int, ...] = (8, 16, 24)
    """Layers of the encoder whose states are added, by default."""
    architectures = ("Qwen3VLForConditionalGeneration",)
    model_type = "qwen3_vl"
    defaults: ClassVar = {"num_key_value_heads": 32, "head_dim": 128}
    cases: ClassVar = {
        "plain": {
            "image_token_id": 7,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "mrope_section": [6, 3, 3], "rope_theta": 10_000.0},
            "vision_config": {**_VISION, "deepstack_visual_indexes": [0, 1]},
        },
        "biases": {
            "image_token_id": 9,
            "attention_bias": True,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "mrope_section": [5, 4, 3], "rope_theta": 500.0},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "out_hidden_size": 64,
                "depth": 4,
                "num_heads": 2,
                "patch_size": 6,
                "num_position_embeddings": 144,
                "deepstack_visual_indexes": [1],
                "hidden_act": "gelu",
                "rope_parameters": {"rope_type": "axial", "rope_theta": 300.0},
            },
        },
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model, a Qwen3 whose rope turns by three coordinates."""
        rope = turned(config, rope_spec(config, head_dim_of(config), theta=500_000.0), (24, 20, 20), interleaved=True)
        return replace(Qwen3().traits(config), rope=lambda layer: rope, window=lambda layer: None)

    def images(self, config: ModelConfig) -> ImageSpec:
        """Describe the encoder, whose attention turns by row and column, and which has a table of positions as well."""
        part = config.part("vision_config")
        if part is None:
            raise ModelError(f"{config.origin}: vision_config is missing")
        part = part.filled({"hidden_act": "gelu_pytorch_tanh", "temporal_patch_size": 2}, {})
        hidden, rows = part.count("hidden_size"), part.count("num_position_embeddings", 2304)
        spec = self.encoder(config, part, hidden, part.count("intermediate_size"), layer_norm=True, names=_NAMES)
        side, wide = math.isqrt(rows), hidden * spec.merge**2
        found = "deepstack_visual_indexes" in part.values
        deep = part.indices("deepstack_visual_indexes") if found else self.deep
        if [*deep] != sorted({*deep}) or any(layer >= part.count("depth") - 1 for layer in deep):
            raise ModelError(
                f"{config.origin}: deepstack_visual_indexes {[*deep]} must be ascending layers before the last one"
            )
        if len(deep) > config.count("num_hidden_layers") or side**2 != rows:
            raise ModelError(
                f"{config.origin}: num_position_embeddings={rows} must be a square, and the decoder must have a layer "
                f"for each of deepstack_visual_indexes {[*deep]}"
            )

        def merger(name: str, norm: NormSpec | None = None) -> MergerSpec:
            outs = {"linear_fc1": wide, "linear_fc2": config.count("hidden_size")}
            linears = (LinearSpec((f"{name}.{each}",), (out,), wide, bias=True) for each, out in outs.items())
            return MergerSpec(tuple(linears), norm)

        def inner(index: int) -> MergerSpec:
            name = f"visual.deepstack_merger_list.{index}"
            weight, bias = (VectorSpec(f"{name}.norm.{each}", (wide,)) for each in ("weight", "bias"))
            return merger(name, NormSpec(weight, bias))

        return replace(
            spec,
            patch_bias=VectorSpec("visual.patch_embed.proj.bias", (hidden,)),
            merger=merger("visual.merger"),
            deep=tuple(map(inner, range(len(deep)))),
            deep_layers=tuple(deep),
            side=side,
            positions=VectorSpec("visual.pos_embed.weight", (rows, hidden)),
            corners=True,
        )


class Qwen3VlMoe(Qwen3Vl):
    """`Qwen3VLMoeForConditionalGeneration`: most layers have experts, whose weights are normalized."""

    architectures = ("Qwen3VLMoeForConditionalGeneration",)
    model_type = "qwen3_vl_moe"
    defaults: ClassVar = {
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    }
    cases: ClassVar = {
        "plain": {
            **Qwen3Vl.cases["plain"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "mlp_only_layers": [1],
        },
        "every-second": {
            **Qwen3Vl.cases["biases"],
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 96,
            "decoder_sparse_step": 2,
        },
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model; each of its layers has experts, or is listed or skipped by the config."""
        hidden, inner = config.count("hidden_size"), config.count("moe_intermediate_size")
        routed = routed_experts(config)

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
            block = routed(layer, prefix, norm)
            if block is None:
                return None
            count, names = len(block.experts), ("gate_up_proj", "down_proj")
            experts = tuple(
                gate_up_down(f"{prefix}.mlp.experts", hidden, inner, names=names, stack=(index, count), transposed=True)
                for index in range(count)
            )
            return replace(block, experts=experts, normalize=True)

        return replace(super().traits(config), moe=moe)


class Qwen35Processor(QwenProcessor):
    """As that of Qwen3-VL, with another token."""

    usual_token_id = 248_056


class _Encoder(Qwen3Vl):
    """Encoder of Qwen3.5, of which only the last states are read."""

    deep = ()


class Qwen35Vl(Qwen35):
    """`Qwen3_5ForConditionalGeneration`."""

    architectures = ("Qwen3_5ForConditionalGeneration",)
    model_type = "qwen3_5"
    gguf: ClassVar = {}
    cases: ClassVar = {
        "plain": {
            **Qwen35.cases["plain"],
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "image_token_id": 7,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 2, 2],
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
            "vision_config": _VISION,
        }
    }
    processor_settings: ClassVar = Qwen2Vl.processor_settings

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model, whose rope turns by three coordinates."""
        traits = super().traits(config)
        rope = turned(config, traits.rope(0), (11, 11, 10), interleaved=True)
        return replace(traits, rope=lambda layer: rope, ignored=(r"^mtp\.",))

    def images(self, config: ModelConfig) -> ImageSpec:
        """Describe the encoder."""
        return _Encoder().images(config)

    def image_processor(self, config: ModelConfig, settings: ModelConfig) -> ImageProcessor:
        """Return the processor that keeps the shape of an image."""
        return Qwen35Processor(config, settings, self.images(config))


class Qwen35VlMoe(Qwen35Vl, Qwen35Moe):
    """`Qwen3_5MoeForConditionalGeneration`."""

    architectures = ("Qwen3_5MoeForConditionalGeneration",)
    model_type = "qwen3_5_moe"
    gguf: ClassVar = {}
    defaults: ClassVar = Qwen35Moe.defaults
    cases: ClassVar = {"plain": {**Qwen35Moe.cases["plain"], **Qwen35Vl.cases["plain"]}}
