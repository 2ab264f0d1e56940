"""Qwen2-VL and Qwen2.5-VL: images in their own size, and rope by time, row and column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np

from fd_core.errors import BadRequest, ModelError
from fd_core.models.families.builtin.qwen import Qwen2
from fd_core.models.families.contract import (
    Family,
    ImageProcessor,
    ImageSpec,
    LinearSpec,
    MergerSpec,
    RopeSpec,
    Traits,
    VectorSpec,
    head_dim_of,
    rope_spec,
)
from fd_core.models.families.image_processor import Pixels, ProcessedImage, image_part
from fd_core.models.families.images.resizing import BICUBIC, resized
from fd_core.models.families.spec import tower_spec
from fd_core.models.loading.config import ModelConfig

_MOST_PATCHES: Final = 5184
"""Of one image: 72 by 72."""
_NAMES: Final = {
    "model.layers": "visual.blocks",
    "model.norm": "visual.merger.ln_q",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "self_attn.o_proj": "attn.proj",
}
_PLAIN_MLP: Final = {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
_MOST_RATIO: Final = 200
"""Largest ratio of the sides of an image."""


def turned(config: ModelConfig, rope: RopeSpec, usual: tuple[int, ...], *, interleaved: bool = False) -> RopeSpec:
    """Return rope of a text model by time, row and column of a token; `usual` are the pairs of each by default.

    Interleaved pairs take turns, and those that remain turn by time.
    """
    part = config.part("rope_parameters") or config.part("rope_scaling") or ModelConfig({}, origin=config.origin)
    sections, pairs = part.indices("mrope_section") or usual, len(rope.inverse_frequencies)
    if len(sections) != 3 or sum(sections) != pairs or rope.long or (interleaved and 3 * max(sections[1:]) > pairs):
        raise ModelError(f"{config.origin}: mrope_section {sections} does not divide the pairs of a head in three")
    coordinates = np.repeat(np.arange(3), sections)
    if interleaved:
        coordinates[:] = 0
        for each in (1, 2):
            coordinates[each : 3 * sections[each] : 3] = each
    return replace(rope, coordinates=tuple(coordinates.tolist()))


def rope_of_patches(part: ModelConfig, hidden: int, heads: int) -> RopeSpec:
    """Return rope by row and column. Raises `ModelError` if heads cannot be divided so."""
    if hidden % (4 * heads):
        raise ModelError(f"{part.origin}: {hidden} elements in {heads} heads cannot turn by row and column")
    pairs = hidden // heads // 2
    theta = (part.part("rope_parameters") or part).number("rope_theta", 10_000.0)
    turns = theta ** -(np.arange(0, pairs, 2) / pairs)
    return RopeSpec((*turns.tolist(), *turns.tolist()), coordinates=(0,) * (pairs // 2) + (1,) * (pairs // 2))


class Qwen2Vl(Family):
    """`Qwen2VLForConditionalGeneration`."""

    architectures = ("Qwen2VLForConditionalGeneration",)
    model_type = "qwen2_vl"
    defaults: ClassVar = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    cases: ClassVar = {
        "plain": {
            "image_token_id": 7,
            "vision_start_token_id": 8,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0},
            "vision_config": {
                "embed_dim": 48,
                "hidden_size": 64,
                "depth": 2,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 6,
                "spatial_merge_size": 2,
            },
        },
        "window": {
            "image_token_id": 9,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 500.0},
            "vision_config": {
                "embed_dim": 32,
                "hidden_size": 64,
                "depth": 3,
                "num_heads": 2,
                "mlp_ratio": 3,
                "patch_size": 6,
                "spatial_merge_size": 2,
                "hidden_act": "gelu",
                "temporal_patch_size": 2,
            },
        },
    }
    processor_settings: ClassVar = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 6,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * 144, "longest_edge": 20 * 144},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model, a Qwen2 whose rope has sections."""
        rope = turned(config, rope_spec(config, head_dim_of(config), theta=1_000_000.0), (16, 24, 24))
        return replace(Qwen2().traits(config), rope=lambda layer: rope)

    def images(self, config: ModelConfig) -> ImageSpec:
        """Describe the encoder, whose attention turns by row and column."""
        part = config.part("vision_config")
        if part is None:
            raise ModelError(f"{config.origin}: vision_config is missing")
        part = part.filled({"mlp_ratio": 4, "hidden_act": "quick_gelu", "temporal_patch_size": 2}, {})
        hidden = part.count("embed_dim")
        return self.encoder(config, part, hidden, int(hidden * part.number("mlp_ratio")), layer_norm=True)

    def encoder(
        self,
        config: ModelConfig,
        part: ModelConfig,
        hidden: int,
        inner: int,
        *,
        layer_norm: bool,
        names: Mapping[str, str] = _PLAIN_MLP,
    ) -> ImageSpec:
        """Describe an encoder of these widths: with layer norms and plain blocks, or RMS norms and gated ones.

        `names` are those of the plain blocks.
        """
        heads, size = part.count("num_heads"), part.count("patch_size")
        merge, rope = part.count("spatial_merge_size", 2), rope_of_patches(part, hidden, heads)
        values = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_hidden_layers": part.count("depth"),
            "intermediate_size": inner,
            "hidden_act": part.text("hidden_act", ""),
        }
        traits = Traits(
            rope=lambda layer: rope,
            causal=False,
            layer_norm=layer_norm,
            norm_bias=layer_norm,
            eps=1e-6,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            gated=not layer_norm,
            names={**_NAMES, **(names if layer_norm else {})},
            fused={"qkv": "attn.qkv"},
        )
        wide = hidden * merge**2
        return ImageSpec(
            patch=VectorSpec(
                "visual.patch_embed.proj.weight", (hidden, 3, part.count("temporal_patch_size"), size, size)
            ),
            patch_bias=None,
            tower=tower_spec(ModelConfig(values, origin=config.origin), traits, _MOST_PATCHES),
            most_patches=_MOST_PATCHES,
            merge=merge,
            merger=MergerSpec(
                (
                    LinearSpec(("visual.merger.mlp.0",), (wide,), wide, bias=True),
                    LinearSpec(("visual.merger.mlp.2",), (config.count("hidden_size"),), wide, bias=True),
                )
            ),
        )

    def image_processor(self, config: ModelConfig, settings: ModelConfig) -> ImageProcessor:
        """Return the processor that keeps the shape of an image."""
        return QwenProcessor(config, settings, self.images(config))


class Qwen25Vl(Qwen2Vl):
    """`Qwen2_5_VLForConditionalGeneration`: most layers of the encoder attend within windows."""

    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    model_type = "qwen2_5_vl"
    cases: ClassVar = {
        "plain": {
            **Qwen2Vl.cases["plain"],
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 80,
                "out_hidden_size": 64,
                "depth": 5,
                "num_heads": 4,
                "patch_size": 6,
                "spatial_merge_size": 2,
                "window_size": 24,
                "fullatt_block_indexes": [2, 4],
            },
        },
        "window": {
            **Qwen2Vl.cases["window"],
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "out_hidden_size": 64,
                "depth": 2,
                "num_heads": 2,
                "patch_size": 6,
                "spatial_merge_size": 2,
                "window_size": 30,
                "fullatt_block_indexes": [0],
                "hidden_act": "gelu_pytorch_tanh",
            },
        },
    }

    def images(self, config: ModelConfig) -> ImageSpec:
        """Describe the encoder."""
        part = config.part("vision_config")
        if part is None:
            raise ModelError(f"{config.origin}: vision_config is missing")
        part = part.filled({"hidden_act": "silu", "temporal_patch_size": 2, "window_size": 112}, {})
        spec = self.encoder(config, part, part.count("hidden_size"), part.count("intermediate_size"), layer_norm=False)
        whole = part.indices("fullatt_block_indexes") if "fullatt_block_indexes" in part.values else (7, 15, 23, 31)
        window = part.count("window_size") // (spec.merge * spec.patch_size) * spec.merge
        if not window:
            raise ModelError(f"{config.origin}: vision_config.window_size is smaller than a token")
        windowed = tuple(layer for layer in range(part.count("depth")) if layer not in whole)
        return replace(spec, window=window, windowed=windowed)


class QwenProcessor(ImageProcessor):
    """Resizes an image to whole tokens, within the limits of pixels of its settings."""

    placeholder = "<|image_pad|>"
    usual_token_id = 151_655

    def __init__(self, config: ModelConfig, settings: ModelConfig, spec: ImageSpec) -> None:
        """Raises `ModelError` for settings of the wrong kind."""
        self.token_id = config.index("image_token_id", self.usual_token_id)
        size: Any = settings.part("size") or settings
        self.factor = spec.patch_size * spec.merge
        self._least = settings.count("min_pixels", size.count("shortest_edge", 56 * 56))
        most = settings.count("max_pixels", size.count("longest_edge", 28 * 28 * 1280))
        self._most = min(most, spec.most_patches * spec.patch_size**2)
        self._resample = settings.index("resample", BICUBIC)
        self._settings = repr(sorted(settings.values.items()))

    def process(self, pixels: Pixels) -> ProcessedImage:
        """Return the image as one part, with its rows and columns of tokens as the layout."""
        image = resized(pixels, *self.size(*pixels.shape[:2]), self._resample)
        rows, columns = image.shape[0] // self.factor, image.shape[1] // self.factor
        part = image_part(image, rows * columns, (rows, columns), self._settings)
        return ProcessedImage(self.placeholder * part.num_tokens, (part,))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the multiples of a token's side that are nearest, or nearest within the limits.

        A side that is shorter than half a token counts as 0, so that the image is enlarged.
        """
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise BadRequest(
                f"an image of {height} by {width} pixels is more than {_MOST_RATIO} times longer than it is wide",
                field="messages",
            )
        factor = self.factor
        tall, wide = (round(side / factor) * factor for side in (height, width))
        if tall * wide > self._most:
            ratio = math.sqrt(height * width / self._most)
            tall, wide = (max(factor, math.floor(side / ratio / factor) * factor) for side in (height, width))
        elif tall * wide < self._least:
            ratio = math.sqrt(self._least / (height * width))
            tall, wide = (math.ceil(side * ratio / factor) * factor for side in (height, width))
        return tall, wide
