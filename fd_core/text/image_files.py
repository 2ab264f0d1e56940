"""Decoding of images: from data URLs, bytes and images of Pillow to pixels. Server and offline API share this code."""

from __future__ import annotations

import binascii
import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from fd_core.errors import BadRequest
from fd_core.models.families.image_processor import Pixels, ProcessedImage

if TYPE_CHECKING:
    import PIL.Image

_ROWS: Final = 128
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS: Final = 48 * 2**20
"""Pixels of one image, as many as 8,192 by 6,144; decoding takes up to about twelve bytes for each."""
_DATA: Final = re.compile(r"data:(image/[\w.+-]*)?(;[\w.=+-]*)*?;base64,", re.IGNORECASE)
_MAX_HEAD: Final = 256
_CHUNK: Final = 1 << 20
"""Characters decoded at a time, a multiple of 4: the decoder holds the GIL."""


def bytes_of_data_url(url: str, field: str) -> bytes | None:
    """Return the bytes of a data URL; None for another URL. Raises `BadRequest` for invalid base64."""
    found = _DATA.match(url[:_MAX_HEAD])
    if found is None:
        return None
    parts = []
    try:
        for begin in range(found.end(), len(url), _CHUNK):
            text = url[begin : begin + _CHUNK]
            if begin + _CHUNK < len(url) and "=" in text:
                raise binascii.Error
            parts.append(binascii.a2b_base64(text.encode("ascii"), strict_mode=True))
    except ValueError:
        raise BadRequest(f"{field}: the data is not valid base64", field=field) from None
    return b"".join(parts)


def processed(
    process: Callable[[Pixels], ProcessedImage], image: bytes | PIL.Image.Image, field: str
) -> ProcessedImage:
    """Return an image decoded and processed. Raises `BadRequest` that names the field."""
    pixels = decoded(image, field)
    try:
        return process(pixels)
    except BadRequest as error:
        raise BadRequest(f"{field}: {error}", field=field) from None


def decoded(data: bytes | PIL.Image.Image, field: str) -> Pixels:
    """Return the pixels uint8[h, w, 3] of an image or its file, of its first frame, upright; alpha is dropped.

    The format is that of the content. Raises `BadRequest` for anything else, and for more than `MAX_PIXELS`, which are
    counted before they are decoded. The result is that of `transformers.image_utils.load_image`.
    """
    from PIL import Image, ImageOps  # few servers read images

    try:
        opened = Image.open(io.BytesIO(data), formats=_FORMATS) if isinstance(data, bytes) else data.copy()
        with opened as image:
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
