"""LLaVA-NeXT and LLaVA-OneVision: the whole image, and its tiles, whose tokens are joined to one grid."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np

from fd_core.errors import ModelError
from fd_core.models.families.builtin.llama import Llama, Mistral
from fd_core.models.families.builtin.qwen import Qwen2
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
from fd_core.models.families.images.resizing import BICUBIC, resized
from fd_core.models.families.images.siglip import siglip_spec
from fd_core.models.loading.config import ModelConfig

_ROUNDED: Final = 1.1
"""Grids are resized if their sides are more than so many times those that are allowed."""
_PINPOINTS: Final = "image_grid_pinpoints"
_CASE_TOWER: Final = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-3,
}
_CASE_GRIDS: Final = [[48, 48], [48, 96], [96, 48], [96, 96], [48, 144]]


class LlavaOnevision(Family):
    """`LlavaOnevisionForConditionalGeneration`."""

    architectures = ("LlavaOnevisionForConditionalGeneration",)
    model_type = "llava_onevision"
    defaults: ClassVar = {
        **Qwen2.defaults,
        "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
        "projector_hidden_act": "gelu",
        "vision_aspect_ratio": "anyres_max_9",
    }
    cases: ClassVar = {
        "plain": {
            "image_token_index": 7,
            "image_grid_pinpoints": _CASE_GRIDS,
            "vision_aspect_ratio": "anyres_max_9",
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 48,
                "patch_size": 12,
            },
        },
        "reduced": {
            "image_token_index": 9,
            "image_grid_pinpoints": _CASE_GRIDS,
            "vision_aspect_ratio": "anyres_max_1",
            "multimodal_projector_bias": False,
            "projector_hidden_act": "silu",
            "vision_feature_layer": -2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "vision_config": {**_CASE_TOWER, "model_type": "siglip_vision_model", "num_hidden_layers": 3},
        },
    }
    processor_settings: ClassVar = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 48, "width": 48},
        "image_grid_pinpoints": _CASE_GRIDS,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model, a Qwen2."""
        return replace(Qwen2().traits(config), ignored=_unused(config))

    def images(self, config: ModelConfig) -> ImageSpec:
        """Describe the encoder: SigLIP without its last norm, and two linears."""
        vision = config.part("vision_config")
        hidden, wide = 0 if vision is None else vision.count("hidden_size"), config.count("hidden_size")
        bias = config.flag("multimodal_projector_bias", True)
        linears = tuple(
            LinearSpec((f"multi_modal_projector.linear_{index + 1}",), (wide,), ins, bias=bias)
            for index, ins in enumerate((hidden, wide))
        )
        spec = self.encoder(config, MergerSpec(linears))
        sides = [(rows * spec.side, columns * spec.side) for rows, columns in _grids(config, spec)]
        most = _ROUNDED**2 * _most_tiles(config) * spec.side**2
        return replace(
            spec,
            tower=replace(spec.tower, layers=spec.tower.layers[: _layers(config)[0]], final_norm=None),
            newline=VectorSpec("image_newline", (wide,)),
            activation=config.activation("projector_hidden_act"),
            largest=spec.side**2 + int(max(min(rows * columns, most) + rows for rows, columns in sides)),
        )

    def encoder(self, config: ModelConfig, merger: MergerSpec) -> ImageSpec:
        """Describe all layers of the encoder."""
        return siglip_spec(config, "vision_tower", merger, 1)

    def image_processor(self, config: ModelConfig, settings: ModelConfig) -> ImageProcessor:
        """Return the processor that divides an image into tiles."""
        return LlavaProcessor(config, settings, self.images(config))


class LlavaNext(LlavaOnevision):
    """`LlavaNextForConditionalGeneration`: CLIP, and Llama or Mistral; grids of tiles are not reduced."""

    architectures = ("LlavaNextForConditionalGeneration",)
    model_type = "llava_next"
    defaults: ClassVar = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
    }
    cases: ClassVar = {
        "llama": {
            "image_token_index": 7,
            "image_grid_pinpoints": _CASE_GRIDS,
            "attention_bias": True,
            "mlp_bias": True,
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 48,
                "patch_size": 12,
            },
        },
        "mistral": {
            "image_token_index": 9,
            "image_grid_pinpoints": _CASE_GRIDS,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "silu",
            "vision_feature_layer": -1,
            "text_config": {"model_type": "mistral"},
            "sliding_window": 7,
            "vision_config": {**_CASE_TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 2},
        },
    }
    processor_settings: ClassVar = {
        **LlavaOnevision.processor_settings,
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 48},
        "crop_size": {"height": 48, "width": 48},
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe the text model."""
        kind = (config.part("text_config") or ModelConfig({})).text("model_type", "llama")
        if kind not in ("llama", "mistral"):
            raise ModelError(f"{config.origin}: text_config.model_type must be llama or mistral, got {kind!r:.40}")
        if kind == "llama":
            text, inner = Llama().traits(config), config.count("intermediate_size", 11_008)
        else:
            config.count("num_key_value_heads")  # the defaults of both differ
            text, inner = Mistral().traits(config), config.count("intermediate_size")
        return replace(text, inner=inner, ignored=_unused(config))

    def encoder(self, config: ModelConfig, merger: MergerSpec) -> ImageSpec:
        """Describe all layers of CLIP (Radford et al., 2021), which has a class token, and a norm before them."""
        part = config.part("vision_config") or ModelConfig({}, origin=config.origin)
        part = part.filled({"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}, {})
        spec = siglip_spec(
            replace(config, values={**config.values, "vision_config": part.values}), "vision_tower", merger, 1
        )
        count, hidden, tower = spec.side**2 + 1, spec.patch.shape[0], spec.tower
        norm = NormSpec(*(VectorSpec(f"vision_tower.pre_layrnorm.{each}", (hidden,)) for each in ("weight", "bias")))
        table = VectorSpec("vision_tower.embeddings.position_embedding.weight", (count, hidden))
        return replace(
            spec,
            first=VectorSpec("vision_tower.embeddings.class_embedding", (hidden,)),
            patch_bias=None,
            most_patches=count,
            tower=replace(tower, embedding_norm=norm, positions=table, max_positions=count),
        )

    def image_processor(self, config: ModelConfig, settings: ModelConfig) -> ImageProcessor:
        """Return the processor that divides an image into tiles."""
        return LlavaNextProcessor(config, settings, self.images(config))


class LlavaProcessor(ImageProcessor):
    """Resizes an image to the grid of tiles that loses least of it, with black at both sides where it is narrower."""

    placeholder = "<image>"
    usual_token_id = 151_646

    def __init__(self, config: ModelConfig, settings: ModelConfig, spec: ImageSpec) -> None:
        """Raises `ModelError` for settings that cannot be used."""
        self.token_id = config.index("image_token_index", self.usual_token_id)
        self._side, self._tile = spec.side, spec.side * spec.patch_size
        self._grids, self._most_tiles = _grids(config, spec), _most_tiles(config)
        size = settings.part("size") or ModelConfig({"height": self._tile, "width": self._tile})
        same = _PINPOINTS not in settings.values or _grids(settings, spec) == self._grids
        if (size.count("height"), size.count("width")) != (self._tile, self._tile) or not same:
            raise ModelError(
                f"{settings.origin}: size and {_PINPOINTS} must be those of config.json: tiles of {self._tile} pixels"
            )
        if any(settings.values.get(name) is None for name in ("image_mean", "image_std")):
            raise ModelError(f"{settings.origin}: image_mean or image_std is missing")
        if settings.values.get("do_center_crop"):
            raise ModelError(f"{settings.origin}: do_center_crop must be false")
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not settings.flag(name, True):
                raise ModelError(f"{settings.origin}: {name} must be true")
        self._resample = settings.index("resample", BICUBIC)
        self._background = (settings.channels("image_mean", 0.5).astype(np.float64) * 255).astype(np.uint8)
        self._settings = repr(sorted(settings.values.items()))

    def process(self, pixels: Pixels) -> ProcessedImage:
        """Return the whole image and its tiles, one below the other, as one part."""
        (height, width), tile = pixels.shape[:2], self._tile
        rows, columns = self._grid_of(height, width)
        tall, wide = rows * tile, columns * tile
        if wide / width < tall / height:
            tall = min(math.ceil(height * (wide / width)), tall)
        else:
            wide = min(math.ceil(width * (tall / height)), wide)
        image = resized(pixels, tall, wide, self._resample)
        margins = [
            ((each - used) // 2, (each - used + 1) // 2) for each, used in ((rows * tile, tall), (columns * tile, wide))
        ]
        image = np.pad(image, [*margins, (0, 0)])
        tiles = image.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, 3)
        stacked = np.concatenate([resized(pixels, tile, tile, self._resample), tiles])
        top, left = self._margins(height, width, rows, columns)
        tall, wide = rows * self._side - 2 * top, columns * self._side - 2 * left
        ratio = math.sqrt(tall * wide / (self._most_tiles * self._side**2))
        if ratio > _ROUNDED:
            tall, wide = max(int(tall // ratio), 1), max(int(wide // ratio), 1)
        return self._part(stacked, tall * wide + tall, (rows, columns, top, left, tall, wide))

    def process_among(self, pixels: Pixels) -> ProcessedImage:
        """Return the whole image, in a square."""
        height, width, _ = pixels.shape
        side = max(height, width)
        square = np.tile(self._background, (side, side, 1))
        top, left = (side - height) // 2, (side - width) // 2
        square[top : top + height, left : left + width] = pixels
        return self._part(resized(square, self._tile, self._tile, self._resample), 1, ())

    def _part(self, pixels: Pixels, more: int, layout: tuple[int, ...]) -> ProcessedImage:
        """Return an image with `more` tokens than those of a tile."""
        part = image_part(pixels, self._side**2 + more, layout, self._settings)
        return ProcessedImage(self.placeholder * part.num_tokens, (part,))

    def _grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the grid on which most pixels of an image are left, the smallest of them."""

        def loss(grid: tuple[int, int]) -> tuple[int, int]:
            tall, wide = (each * self._tile for each in grid)
            scale = min(wide / width, tall / height)
            kept = min(int(width * scale) * int(height * scale), height * width)
            return -kept, tall * wide

        return min(self._grids, key=loss)

    def _margins(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows of tokens above an image, and the columns to the left of it, that show nothing of it."""
        tall, wide = rows * self._side, columns * self._side
        if width / height > wide / tall:
            return (tall - int(round(height * (wide / width), 7))) // 2, 0
        return 0, (wide - int(round(width * (tall / height), 7))) // 2


class LlavaNextProcessor(LlavaProcessor):
    """Divides each of several images as well."""

    usual_token_id = 32_000

    def __init__(self, config: ModelConfig, settings: ModelConfig, spec: ImageSpec) -> None:
        """Raises `ModelError` for settings that cannot be used."""
        if config.text("vision_feature_select_strategy", "default") != "default":
            raise ModelError(f"{config.origin}: vision_feature_select_strategy must be default")
        tile = spec.side * spec.patch_size
        sizes = [settings.part(name) for name in ("size", "crop_size")]
        if any(each != tile for part in sizes if part is not None for each in part.values.values()):
            raise ModelError(f"{settings.origin}: size and crop_size must be those of config.json: {tile} pixels")
        square = {"size": {"height": tile, "width": tile}, "do_center_crop": False}
        super().__init__(config, replace(settings, values={**settings.values, **square}), spec)

    def process_among(self, pixels: Pixels) -> ProcessedImage:
        """Process an image of a prompt that has several, as the only one."""
        return self.process(pixels)


def _unused(config: ModelConfig) -> tuple[str, ...]:
    """Return patterns of the tensors of an encoder that are not read."""
    layers = "".join(rf"|encoder\.layers\.{layer}" for layer in range(*_layers(config)))
    return (rf"^vision_tower\.(head|post_layernorm{layers})\.",)


def _layers(config: ModelConfig) -> tuple[int, int]:
    """Return the number of layers of the encoder that are computed, and of those that the checkpoint has."""
    vision, after = config.part("vision_config"), config.values.get("vision_feature_layer", -1)
    count = 0 if vision is None else vision.count("num_hidden_layers")
    if type(after) is not int or not -count <= after < 0:
        raise ModelError(f"{config.origin}: vision_feature_layer must be from -{count} to -1, got {after!r:.40}")
    return count + 1 + after, count


def _grids(config: ModelConfig, spec: ImageSpec) -> list[tuple[int, int]]:
    """Return the rows and columns of tiles of every grid. Raises `ModelError` if they are not whole tiles."""
    tile = spec.side * spec.patch_size
    match config.values.get(_PINPOINTS):
        case [*pairs] if pairs and all(
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(type(each) is int and each > 0 and each % tile == 0 for each in pair)
            for pair in pairs
        ):
            return [(pair[0] // tile, pair[1] // tile) for pair in pairs]
    raise ModelError(f"{config.origin}: {_PINPOINTS} must be a list of heights and widths that are multiples of {tile}")


def _most_tiles(config: ModelConfig) -> float:
    """Return the size, in tiles, to which larger grids are reduced."""
    if "vision_aspect_ratio" not in config.values:
        return math.inf
    name = config.text("vision_aspect_ratio", "")
    found = re.fullmatch(r"anyres_max_([1-9]\d{0,3})", name)
    if found is None:
        raise ModelError(f"{config.origin}: vision_aspect_ratio must be anyres_max_ and a number, got {name!r:.40}")
    return int(found[1])
