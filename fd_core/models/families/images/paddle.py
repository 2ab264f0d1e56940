"""PaddleOCR-VL: an encoder as SigLIP's for images of any shape, and ERNIE 4.5 with rope by time, row and column."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final

from fd_core.models.families.builtin.ernie import Ernie
from fd_core.models.families.contract import (
    Family,
    ImageProcessor,
    ImageSpec,
    LinearSpec,
    MergerSpec,
    NormSpec,
    Traits,
    VectorSpec,
    head_dim_of,
    rope_spec,
)
from fd_core.models.families.images.qwen import QwenProcessor, turned
from fd_core.models.families.images.siglip import siglip_spec
from fd_core.models.loading.config import ModelConfig

_MOST_PATCHES: Final = 14_400
"""Of one image: 120 by 120, those of the largest page that the published processor keeps."""


class PaddleOcrVl(Family):
    """`PaddleOCRVLForConditionalGeneration`."""

    architectures = ("PaddleOCRVLForConditionalGeneration",)
    model_type = "paddleocr_vl"
    defaults: ClassVar = Ernie.defaults
    cases: ClassVar = {
        "plain": {
            "image_token_id": 7,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 5, 5], "rope_theta": 10_000.0},
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 30,
                "patch_size": 6,
            },
        },
        "biases": {
            "image_token_id": 9,
            "head_dim": 24,
            "use_bias": True,
            "rope_parameters": {"rope_type": "default", "mrope_section": [6, 2, 4], "rope_theta": 700.0},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 72,
                "patch_size": 6,
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-3,
            },
        },
    }
    processor_settings: ClassVar = {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "patch_size": 6,
        "merge_size": 2,
        "min_pixels": 4 * 144,
        "max_pixels": 20 * 144,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model, an ERNIE 4.5 whose rope rotates halves of a head, by three coordinates."""
        rope = turned(config, rope_spec(config, head_dim_of(config), theta=500_000.0), (16, 24, 24))
        text = Ernie().traits(config)
        unused = r"\.packing_position_embedding\.", r"\.vision_model\.head\."
        return replace(text, rope=lambda layer: rope, ignored=(*text.ignored, *unused))

    def images(self, config: ModelConfig) -> ImageSpec:
        """Describe the encoder, and the projector with a norm of its own."""
        vision = config.part("vision_config") or ModelConfig({}, origin=config.origin)
        merge, hidden = vision.count("spatial_merge_size", 2), vision.count("hidden_size")
        wide = hidden * merge**2
        weight, bias = (VectorSpec(f"mlp_AR.pre_norm.{each}", (hidden,)) for each in ("weight", "bias"))
        merger = MergerSpec(
            (
                LinearSpec(("mlp_AR.linear_1",), (wide,), wide, bias=True),
                LinearSpec(("mlp_AR.linear_2",), (config.count("hidden_size"),), wide, bias=True),
            ),
            patch_norm=NormSpec(weight, bias),
            eps=1e-5,
        )
        return siglip_spec(config, "visual.vision_model", merger, merge, most_patches=_MOST_PATCHES)

    def image_processor(self, config: ModelConfig, settings: ModelConfig) -> ImageProcessor:
        """Return the processor that keeps the shape of an image."""
        given = settings.filled({"size": {"shortest_edge": 384**2, "longest_edge": 1536**2}}, {})
        return PaddleProcessor(config, given, self.images(config))


class PaddleProcessor(QwenProcessor):
    """Enlarges sides that are shorter than a token first."""

    placeholder = "<|IMAGE_PLACEHOLDER|>"
    usual_token_id = 100_295

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of an image after it is resized."""
        factor = self.factor
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return super().size(height, width)
