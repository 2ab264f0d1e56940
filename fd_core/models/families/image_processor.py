"""Contract of an image processor: from decoded pixels to the text and the images of a prompt."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.errors import BadRequest
from fd_core.types import Image

Pixels = npt.NDArray[np.uint8]


class ProcessedImage(NamedTuple):
    """An image as its model reads it."""

    text: str
    """Replaces the placeholder in the prompt; contains `sum(num_tokens)` placeholder tokens."""
    parts: tuple[Image, ...]
    """In the order of their tokens; `start` is 0."""


class ImageProcessor(abc.ABC):
    """Processor of one model; its methods block and may be called on any thread."""

    placeholder: str
    """Text that the chat template writes for an image."""
    token_id: int
    """Id of each token of an image."""

    @abc.abstractmethod
    def process(self, pixels: Pixels) -> ProcessedImage:
        """Resize and divide an image uint8[h, w, 3]. Raises `BadRequest` for a size that the model cannot take."""

    def process_among(self, pixels: Pixels) -> ProcessedImage:
        """Process an image of a prompt that has several, by default as the only one."""
        return self.process(pixels)

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """Replace the placeholders of a rendered prompt, one for each image.

        Raises `BadRequest` if there are more or fewer: a message contains the placeholder, or the template wrote none.
        """
        pieces = text.split(self.placeholder)
        if len(pieces) != len(images) + 1:
            raise BadRequest(
                f"the prompt contains {self.placeholder!r} {len(pieces) - 1} times for {len(images)} images; messages "
                "must not contain it, and the chat template must write it once for each image",
                field="messages",
            )
        return pieces[0] + "".join(image.text + after for image, after in zip(images, pieces[1:], strict=True))

    def place(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> tuple[Image, ...]:
        """Return the images of a prompt at their places; `BadRequest` if its ids have another number of tokens."""
        places = np.flatnonzero(np.asarray(ids) == self.token_id)
        parts, at = [part for image in images for part in image.parts], 0
        placed = []
        if len(places) != (wanted := sum(part.num_tokens for part in parts)):
            message = f"the prompt has {len(places)} tokens of images, expected {wanted}: messages must contain none"
            raise BadRequest(message, field="messages")
        for part in parts:
            start = int(places[at])
            at += part.num_tokens
            if places[at - 1] != start + part.num_tokens - 1:
                raise BadRequest("the chat template divides an image", field="messages")
            placed.append(msgspec.structs.replace(part, start=start))
        return tuple(placed)


def image_part(pixels: Pixels, num_tokens: int, layout: tuple[int, ...] = (), settings: str = "") -> Image:
    """Return the part of uint8[h, w, 3], with its digest, in which the `settings` of a processor count."""
    (height, width, _), data = pixels.shape, np.ascontiguousarray(pixels).tobytes()
    named = hashlib.blake2b(repr((settings, num_tokens, height, width, layout)).encode(), digest_size=16)
    named.update(data)
    return Image(0, num_tokens, named.digest(), (height, width), data, layout)
