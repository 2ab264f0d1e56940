"""Resizing as Pillow does it, which the processors of models are defined by."""

from __future__ import annotations

from typing import Final

import numpy as np

from fd_core.models.families.image_processor import Pixels

LANCZOS: Final = 1
BILINEAR: Final = 2
BICUBIC: Final = 3
"""Numbers of Pillow's filters, as `resample` in the settings of a processor has them."""


def resized(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    """Return an image uint8[h, w, 3] in another size."""
    if pixels.shape[:2] == (height, width):
        return pixels
    from PIL import Image  # few processes read images

    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling(resample)))
