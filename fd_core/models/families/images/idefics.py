"""Idefics 3 and SmolVLM: tiles of one size, each encoded alone, and the whole image as the last tile."""

from __future__ import annotations

from typing import ClassVar

from fd_core.models.families.builtin.llama import Llama
from fd_core.models.families.contract import Family, ImageProcessor, ImageSpec, LinearSpec, MergerSpec, Traits
from fd_core.models.families.images.siglip import siglip_spec
from fd_core.models.families.images.tiles import IdeficsProcessor
from fd_core.models.loading.config import ModelConfig


class Idefics3(Family):
    """`Idefics3ForConditionalGeneration`, and `SmolVLMForConditionalGeneration`."""

    architectures = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
    model_type = "idefics3"
    cases: ClassVar = {
        "plain": {
            "image_token_id": 7,
            "scale_factor": 2,
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 48,
                "patch_size": 6,
            },
        },
        "merged": {
            "image_token_id": 9,
            "scale_factor": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 60,
                "patch_size": 4,
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-3,
            },
        },
    }
    processor_settings: ClassVar = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 120},
        "max_image_size": {"longest_edge": 48},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model, a Llama."""
        return Llama().traits(config)

    def images(self, config: ModelConfig) -> ImageSpec:
        """Describe the encoder: SigLIP, and one linear of the states of neighbouring patches."""
        merge = config.count("scale_factor", 2)
        vision = config.part("vision_config")
        hidden = 0 if vision is None else vision.count("hidden_size")
        linear = LinearSpec(
            ("model.connector.modality_projection.proj",), (config.count("hidden_size"),), merge**2 * hidden
        )
        return siglip_spec(config, "model.vision_model", MergerSpec((linear,)), merge)

    def image_processor(self, config: ModelConfig, settings: ModelConfig) -> ImageProcessor:
        """Return the processor that divides an image into tiles."""
        spec = self.images(config)
        return IdeficsProcessor(config, settings, spec.patch_size * spec.merge, spec.side // spec.merge)
