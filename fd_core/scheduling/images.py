"""Images of prompts, as the scheduler sees them: their part in prefix keys, and the encoder's budget of a step.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from fd_core.config import Limits
from fd_core.errors import BadRequest
from fd_core.types import Image, IntArray, RequestSpec

_DIGEST_BYTES: Final = 16


def check_images(spec: RequestSpec, limits: Limits) -> None:
    """Raise `BadRequest` for images that the model does not take, or that contradict the prompt or the request."""
    images, end, last = spec.images, 0, len(spec.prompt) - (spec.prefill_job is None)
    if not limits.max_image_tokens:
        raise BadRequest("this model takes no images", field="images")
    for image in images:
        pixels = 3 * image.size[0] * image.size[1] == len(image.pixels) > 0
        if image.start < end or image.num_tokens < 1 or image.end > last or not pixels:
            message = "an image is not where the prompt has its tokens, ends the prompt, or has other pixels"
            raise BadRequest(message, field="images")
        if image.num_tokens > limits.max_image_tokens:
            raise BadRequest(
                f"an image has {image.num_tokens} tokens, more than the {limits.max_image_tokens} of a step",
                field="images",
                hint="use a smaller image",
            )
        end = image.end
    if spec.params.prompt_logprobs is not None or spec.pooling is not None:
        what = "prompt_logprobs" if spec.pooling is None else "pooling"
        raise BadRequest(f"{what} is not available for prompts with images", field=what)


def salted(images: tuple[Image, ...], salt: str) -> tuple[Image, ...]:
    """Return images whose digests differ under another salt, so that nothing of one is found by another."""
    if not salt:
        return images
    named = [hashlib.blake2b(image.digest, digest_size=_DIGEST_BYTES, key=_key(salt)).digest() for image in images]
    return tuple(msgspec.structs.replace(image, digest=name) for image, name in zip(images, named, strict=True))


def _key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode()).digest()


def identity(tokens: IntArray, images: Sequence[Image]) -> IntArray:
    """Return tokens for prefix keys: those of an image are negative and follow from its digest."""
    named = tokens.copy()
    for image in images:
        data = hashlib.shake_128(image.digest).digest(4 * image.num_tokens)
        named[image.start : image.end] = np.frombuffer(data, "<i4") | np.int32(-(2**31))
    return named


def whole_blocks(images: Sequence[Image], blocks: int, size: int) -> int:
    """Return how many of the leading `blocks`, of `size` tokens, end outside every image."""
    for image in reversed(images):
        if image.start < blocks * size < image.end:
            blocks = image.start // size
    return blocks


class ImageBudget:
    """Tokens of images that may still be encoded in one step."""

    __slots__ = ("_left", "_whole")

    def __init__(self, limit: int, *, whole: bool = False) -> None:
        """`whole`: a chunk never ends within an image."""
        self._left, self._whole = limit, whole

    def cut(self, images: Sequence[Image], start: int, wanted: int) -> int:
        """Charge the images that begin among `wanted` tokens from `start`; return the tokens before one too many.

        An image is charged once, in the chunk with its first token, whether or not its states are known already.
        """
        for image in images:
            if start <= image.start < start + wanted:
                if image.num_tokens > self._left or (self._whole and image.end > start + wanted):
                    return image.start - start
                self._left -= image.num_tokens
        return wanted
