"""ERNIE 4.5 VL: tokens of images have experts of their own, and a resampler follows the encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Final

from fd_core.errors import ModelError
from fd_core.models.families.builtin.ernie import Ernie
from fd_core.models.families.contract import (
    Family,
    ImageProcessor,
    ImageSpec,
    LinearSpec,
    MergerSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    Traits,
    VectorSpec,
    gate_up_down,
    head_dim_of,
    rope_spec,
)
from fd_core.models.families.images.qwen import QwenProcessor, rope_of_patches
from fd_core.models.families.spec import tower_spec
from fd_core.models.loading.config import ModelConfig

_MOST_PATCHES: Final = 14_400
"""Of one image: 120 by 120."""
_NAMES: Final = {
    "model.layers": "vision_model.blocks",
    "model.norm": "vision_model.ln",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "self_attn.o_proj": "attn.proj",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
_TIMES: Final = 2
"""Frames that the resampler joins."""


class ErnieVl(Family):
    """`Ernie4_5_VLMoeForConditionalGeneration`."""

    architectures = ("Ernie4_5_VLMoeForConditionalGeneration",)
    model_type = "ernie4_5_vl_moe"
    defaults: ClassVar = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    cases: ClassVar = {
        "plain": {
            "image_token_id": 7,
            "image_start_token_id": 11,
            "image_end_token_id": 12,
            "moe_num_experts": 3,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": [64, 32],
            "moe_norm_min": 0.7,
            "rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 10_000.0},
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 80,
                "depth": 2,
                "num_heads": 4,
                "patch_size": 6,
                "rms_norm_eps": 1e-3,
            },
        },
        "biases": {
            "image_token_id": 9,
            "image_start_token_id": 12,
            "image_end_token_id": 12,
            "use_bias": True,
            "moe_num_experts": 4,
            "moe_k": 3,
            "moe_num_shared_experts": 0,
            "moe_intermediate_size": [32, 96],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 4], "rope_theta": 700.0},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "depth": 3,
                "num_heads": 2,
                "patch_size": 6,
                "hidden_act": "gelu",
            },
        },
    }
    processor_settings: ClassVar = {
        "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
        "patch_size": 6,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * 144, "longest_edge": 20 * 144},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model: an ERNIE 4.5 with experts of two kinds in most layers."""
        config.refuse("im_patch_id", "checkpoints in Baidu's own form must be converted to that of transformers")
        hidden, count = config.count("hidden_size"), config.count("moe_num_experts", 64)
        rope, bias, layers = _rope(config), config.flag("use_bias"), config.count("num_hidden_layers")
        kinds = config.strings("mlp_layer_types") or ["dense", *["sparse"] * (layers - 1)]
        if len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
            raise ModelError(f"{config.origin}: mlp_layer_types must have dense or sparse for each of {layers} layers")
        widths = config.indices("moe_intermediate_size") or (1536, 512)
        if len(widths) != 2 or not all(widths):
            raise ModelError(f"{config.origin}: moe_intermediate_size must have a width for texts and one for images")
        shared = widths[0] * config.index("moe_num_shared_experts", 2)

        def block(kind: int, prefix: str, norm: NormSpec) -> MoeSpec:
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{prefix}.gate.weight{'_1' * kind}", (count, hidden), transposed=True),
                experts=tuple(
                    gate_up_down(f"{prefix}.experts.{index}", hidden, widths[kind])
                    for index in range(kind * count, (kind + 1) * count)
                ),
                top_k=config.count("moe_k", 6),
                normalize=True,
                norm_floor=config.number("moe_norm_min", 1e-12),
                correction_bias=VectorSpec(f"{prefix}.moe_statics.e_score_correction_bias", (count,), stack=(kind, 2)),
                shared=gate_up_down(f"{prefix}.shared_experts", hidden, shared, bias) if shared and not kind else None,
            )

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
            if kinds[layer] == "dense":
                return None
            text, images = (block(kind, f"{prefix}.mlp", norm) for kind in range(2))
            return replace(text, images=images)

        return replace(Ernie().traits(config), rope=lambda layer: rope, moe=moe)

    def images(self, config: ModelConfig) -> ImageSpec:
        """Describe the encoder, whose attention turns by row and column, and the resampler."""
        part = config.part("vision_config")
        if part is None:
            raise ModelError(f"{config.origin}: vision_config is missing")
        hidden, size = part.count("hidden_size", 1280), part.count("patch_size", 14)
        merge = part.count("spatial_merge_size", 2)
        if part.count("in_channels", 3) != 3 or part.count("temporal_merge_size", _TIMES) != _TIMES:
            raise ModelError(f"{config.origin}: vision_config.in_channels must be 3, and temporal_merge_size {_TIMES}")
        heads, eps = part.count("num_heads", 16), part.number("rms_norm_eps", 1e-6)
        rope = rope_of_patches(part, hidden, heads)
        values = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_hidden_layers": part.count("depth", 32),
            "intermediate_size": part.count("intermediate_size", 5120),
            "hidden_act": part.text("hidden_act", "quick_gelu"),
        }
        traits = Traits(
            rope=lambda layer: rope,
            causal=False,
            layer_norm=True,
            norm_bias=True,
            eps=eps,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            gated=False,
            names=_NAMES,
            fused={"qkv": "attn.qkv"},
        )
        ids = {"image_token_id": 100_295, "image_start_token_id": 101_304, "image_end_token_id": 101_305}
        return ImageSpec(
            patch=VectorSpec("vision_model.patch_embed.proj.weight", (hidden, 3 * size**2)),
            patch_side=size,
            patch_bias=None,
            tower=tower_spec(ModelConfig(values, origin=config.origin), traits, _MOST_PATCHES),
            most_patches=_MOST_PATCHES,
            merge=merge,
            merger=_resampler(config, hidden * merge**2, eps),
            kind_ids=tuple(config.index(name, usual) for name, usual in ids.items()),
        )

    def image_processor(self, config: ModelConfig, settings: ModelConfig) -> ImageProcessor:
        """Return the processor that keeps the shape of an image."""
        given = settings.filled({"size": {"shortest_edge": 56**2, "longest_edge": 6177 * 28**2}}, {})
        return ErnieProcessor(config, given, self.images(config))


def _rope(config: ModelConfig) -> RopeSpec:
    """Return rope by time, row and column: the first pairs turn by row and column in turns, the others by time."""
    rope = rope_spec(config, head_dim_of(config), theta=500_000.0, interleaved=True)
    part: Any = config.part("rope_parameters") or config.part("rope_scaling") or ModelConfig({})
    sections, pairs = part.indices("mrope_section") or (22, 22, 20), len(rope.inverse_frequencies)
    if len(sections) != 3 or sections[0] != sections[1] or sum(sections) != pairs or rope.long:
        raise ModelError(f"{config.origin}: mrope_section {sections} does not divide the pairs of a head in three")
    return replace(rope, coordinates=(1, 2) * sections[0] + (0,) * sections[2])


def _resampler(config: ModelConfig, wide: int, eps: float) -> MergerSpec:
    """Return what merges neighbours, then joins frames, of which an image has two that are the same."""
    name, hidden = "resampler_model", config.count("hidden_size")

    def linear(place: str, ins: int, out: int) -> LinearSpec:
        return LinearSpec((f"{name}.{place}",), (out,), ins, bias=True)

    def norm(place: str) -> NormSpec:
        weight, bias = (VectorSpec(f"{name}.{place}.{each}", (wide,)) for each in ("weight", "bias"))
        return NormSpec(weight, bias)

    joined = linear("temporal_linear.0", _TIMES * wide, wide), linear("temporal_linear.2", wide, wide)
    last = NormSpec(VectorSpec(f"{name}.after_norm.weight", (hidden,)))
    return MergerSpec(
        (linear("spatial_linear.0", wide, wide), linear("spatial_linear.2", wide, wide)),
        then=(
            MergerSpec(joined, norm("spatial_linear.3"), eps=eps, frames=_TIMES),
            MergerSpec((linear("mlp", wide, hidden),), norm("temporal_linear.3"), eps=eps),
            MergerSpec((), last, eps=config.number("rms_norm_eps", 1e-5)),
        ),
    )


class ErnieProcessor(QwenProcessor):
    """Enlarges small images, and reduces large ones."""

    placeholder = "<|IMAGE_PLACEHOLDER|>"
    usual_token_id = 100_295
