"""Files of images, and a processor that makes a token of each 8 by 8 pixels."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from fd_core.models.families.image_processor import ImageProcessor, Pixels, ProcessedImage, image_part
from fd_core.text.chat_template import ChatTemplate

PLACEHOLDER = "\x01"
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'image' %}\x01{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)


class SmallProcessor(ImageProcessor):
    placeholder = PLACEHOLDER
    token_id = 1
    max_tokens = 64

    def process(self, pixels: Pixels) -> ProcessedImage:
        count = max(1, pixels.shape[0] // 8 * (pixels.shape[1] // 8))
        return ProcessedImage(f"[{PLACEHOLDER * count}]", (image_part(pixels, count),))


def file_of(kind: str = "PNG", width: int = 16, height: int = 8, mode: str = "RGB", seed: int = 0, **options) -> bytes:  # type: ignore[no-untyped-def]
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
