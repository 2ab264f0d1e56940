"""Processor of Idefics 3 and SmolVLM: an image is enlarged to whole tiles, which are followed by the whole of it."""

from __future__ import annotations

import math
from typing import Final

from fd_core.errors import ModelError
from fd_core.models.families.image_processor import ImageProcessor, Pixels, ProcessedImage, image_part
from fd_core.models.families.images.resizing import LANCZOS, resized
from fd_core.models.loading.config import ModelConfig

_LARGEST: Final = 4096
"""Longest side of an image in pixels, whatever the settings have."""
_AROUND: Final = "<fake_token_around_image>"
_WHOLE: Final = "<global-img>"


class IdeficsProcessor(ImageProcessor):
    """Divides an image into square tiles of one size, unless its settings forbid it."""

    placeholder = "<image>"

    def __init__(self, config: ModelConfig, settings: ModelConfig, pixels: int, side: int) -> None:
        """A token has `pixels` rows and columns, and a tile at most `side` rows and columns of tokens.

        Raises `ModelError` for settings that cannot be used.
        """
        size, tile = (settings.part(name) or ModelConfig({}) for name in ("size", "max_image_size"))
        self.token_id = config.index("image_token_id", 128_257)
        self._tile = tile.count("longest_edge", 364)
        self._tokens = (self._tile // pixels) ** 2
        if self._tile % pixels or not 0 < self._tile <= side * pixels:
            raise ModelError(
                f"{settings.origin}: tiles of {self._tile} pixels cannot be divided into at most {side} rows of tokens "
                f"of {pixels} pixels"
            )
        self._longest = size.count("longest_edge", 4 * 364)
        self._divides = settings.flag("do_image_splitting", True)
        self._resample = settings.index("resample", LANCZOS)
        self._settings = repr(sorted(settings.values.items()))
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not settings.flag(name, True):
                raise ModelError(f"{settings.origin}: {name} must be true")

    def process(self, pixels: Pixels) -> ProcessedImage:
        """Return the tiles of an image in rows, and the whole image as the last one; one that fits a tile is alone."""
        tile, image = self._tile, resized(pixels, *self._fitted(*pixels.shape[:2]), self._resample)
        rows = columns = 0
        tiles = [image]
        if self._divides:
            image = resized(image, *self._whole_tiles(*image.shape[:2]), self._resample)
            height, width = image.shape[:2]
            tiles = [image]
            if height > tile or width > tile:
                rows, columns = height // tile, width // tile
                tiles = [
                    image[top : top + tile, left : left + tile]
                    for top in range(0, height, tile)
                    for left in range(0, width, tile)
                ]
                tiles.append(resized(image, tile, tile, self._resample))
        else:
            tiles = [resized(image, tile, tile, self._resample)]
        run = self.placeholder * self._tokens
        text = "".join(
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{run}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        text += f"{chr(10) if rows else ''}{_AROUND}{_WHOLE}{run}{_AROUND}"
        return ProcessedImage(text, tuple(image_part(each, self._tokens, settings=self._settings) for each in tiles))

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of an image whose longer side is the longest of the settings."""
        longest, ratio = self._longest, width / height
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            height, width = longest, int(longest * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > _LARGEST:
            width, height = _LARGEST, int(_LARGEST / ratio)
        elif height > width and height > _LARGEST:
            height, width = _LARGEST, int(_LARGEST * ratio)
        return max(height, 1), max(width, 1)

    def _whole_tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the smallest larger image of whole tiles: first of the longer side."""
        tile, ratio = self._tile, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return height, width
