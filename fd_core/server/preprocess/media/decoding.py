"""Decoding of images: from bytes of a client to pixels."""

from __future__ import annotations

import io
from typing import Final

import numpy as np

from fd_core.errors import BadRequest
from fd_core.models.families.image_processor import Pixels

_ROWS: Final = 128
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS: Final = 48 * 2**20
"""Pixels of one image, as many as 8,192 by 6,144; decoding takes up to about twelve bytes for each."""


def decoded(data: bytes, field: str) -> Pixels:
    """Return the pixels uint8[h, w, 3] of an image file, of its first frame, upright; alpha is dropped.

    The format is that of the content. Raises `BadRequest` for anything else, and for more than `MAX_PIXELS`, which are
    counted before they are decoded. The result is that of `transformers.image_utils.load_image`.
    """
    from PIL import Image, ImageOps  # few servers read images

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise Image.DecompressionBombError
            ImageOps.exif_transpose(image, in_place=True)
            upright = image if image.mode == "RGB" else image.convert("RGB")
            pixels = np.empty((upright.height, upright.width, 3), np.uint8)
            for top in range(0, upright.height, _ROWS):  # a copy holds the GIL
                bottom = min(top + _ROWS, upright.height)
                pixels[top:bottom] = np.asarray(upright.crop((0, top, upright.width, bottom)))
            return pixels
    except Image.DecompressionBombError:
        raise BadRequest(
            f"{field}: the image has too many pixels; at most {MAX_PIXELS:,} are allowed", field=field
        ) from None
    except Exception as error:  # noqa: BLE001  # each decoder raises what it likes for a damaged file
        message = f"{field}: the file is not a complete PNG, JPEG, WebP, GIF or BMP image ({type(error).__name__})"
        raise BadRequest(message, field=field) from None
