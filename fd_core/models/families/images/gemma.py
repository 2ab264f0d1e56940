"""Gemma 3 with images: each is one square, whose tokens attend to each other in both directions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from fd_core.errors import ModelError
from fd_core.models.families.builtin.gemma import Gemma3
from fd_core.models.families.contract import (
    Family,
    ImageProcessor,
    ImageSpec,
    LinearSpec,
    MergerSpec,
    NormSpec,
    Traits,
    VectorSpec,
)
from fd_core.models.families.image_processor import Pixels, ProcessedImage, image_part
from fd_core.models.families.images.resizing import BILINEAR, resized
from fd_core.models.families.images.siglip import siglip_spec
from fd_core.models.loading.config import ModelConfig


class Gemma3WithImages(Family):
    """`Gemma3ForConditionalGeneration`."""

    architectures = ("Gemma3ForConditionalGeneration",)
    model_type = "gemma3"
    defaults: ClassVar = {
        **Gemma3.defaults,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "mm_tokens_per_image": 256,
    }
    cases: ClassVar = {
        "mixed": {
            **{name: value for name, value in Gemma3.cases["mixed"].items() if name != "final_logit_softcapping"},
            "image_token_index": 7,
            "mm_tokens_per_image": 16,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 48,
                "patch_size": 6,
            },
        },
        "biases": {
            **Gemma3.cases["biases"],
            "image_token_index": 9,
            "mm_tokens_per_image": 4,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 48,
                "patch_size": 8,
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-3,
            },
        },
    }
    processor_settings: ClassVar = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 48, "width": 48},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model. Raises `ModelError` for capped logits, which `transformers` leaves as they are."""
        config.refuse("final_logit_softcapping", "models with images do not cap logits")
        return replace(Gemma3().traits(config), ignored=(r"^vision_tower\.head\.",))

    def images(self, config: ModelConfig) -> ImageSpec:
        """Describe the encoder: SigLIP, the mean of neighbouring patches, a norm, and one linear."""
        vision, tokens = config.part("vision_config"), config.count("mm_tokens_per_image", 256)
        if vision is None:
            raise ModelError(f"{config.origin}: vision_config is missing")
        side, hidden = math.isqrt(tokens), vision.count("hidden_size")
        patches = vision.count("image_size") // vision.count("patch_size")
        if side**2 != tokens or patches % side:
            raise ModelError(f"{config.origin}: {patches} rows of patches cannot be averaged to {tokens} tokens")
        name = "multi_modal_projector.mm_"
        linear = LinearSpec(
            (f"{name}input_projection_weight",), (config.count("hidden_size"),), hidden, transposed=True
        )
        return replace(
            siglip_spec(config, "vision_tower", MergerSpec((linear,)), patches // side),
            mean_norm=NormSpec(VectorSpec(f"{name}soft_emb_norm.weight", (hidden,))),
            whole=True,
        )

    def image_processor(self, config: ModelConfig, settings: ModelConfig) -> ImageProcessor:
        """Return the processor that resizes an image to one square."""
        return GemmaProcessor(config, settings, self.images(config))


class GemmaProcessor(ImageProcessor):
    """Resizes an image to one square, whatever its shape."""

    placeholder = "<start_of_image>"

    def __init__(self, config: ModelConfig, settings: ModelConfig, spec: ImageSpec) -> None:
        """Raises `ModelError` for settings that cannot be used."""
        self.token_id = config.index("image_token_index", 262_144)
        self._tokens = spec.most_tokens
        self._side = side = spec.side * spec.patch_size
        size = settings.part("size") or ModelConfig({})
        if (size.count("height", 224), size.count("width", 224)) != (side, side):
            raise ModelError(f"{settings.origin}: size must be {side} by {side} pixels, as vision_config has")
        settings.refuse("do_pan_and_scan", "images are not cropped")
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not settings.flag(name, True):
                raise ModelError(f"{settings.origin}: {name} must be true")
        self._resample = settings.index("resample", BILINEAR)
        self._settings = repr(sorted(settings.values.items()))

    def process(self, pixels: Pixels) -> ProcessedImage:
        """Return the image as one part, between the tokens of its begin and end."""
        part = image_part(resized(pixels, self._side, self._side, self._resample), self._tokens, (), self._settings)
        text = f"\n\n{self.placeholder}{'<image_soft_token>' * part.num_tokens}<end_of_image>\n\n"
        return ProcessedImage(text, (part,))
