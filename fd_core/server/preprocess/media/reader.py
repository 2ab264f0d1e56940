"""Reading of the images of a request: fetched side by side, then decoded and processed one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from fd_core.config import ServerConfig
from fd_core.errors import BadRequest
from fd_core.http.bodies import BodyBudget, BodyShare
from fd_core.http.errors import unavailable
from fd_core.models.families.image_processor import ImageProcessor, Pixels, ProcessedImage
from fd_core.server.preprocess.media.fetching import MediaFetcher
from fd_core.text.fair_thread import FairThread
from fd_core.text.image_files import processed

_Process = Callable[[Pixels], ProcessedImage]
MAX_HELD_BYTES: Final = 2**30
"""Limit of the images of running and waiting requests, decoded and resized."""


class RequestedImage(NamedTuple):
    """An image of a request."""

    url: str
    field: str
    """Field of the client's request that contains it."""


class ImageReader:
    """Reads images for one model. One thread decodes them, in turns of the clients, so one is in memory at a time."""

    def __init__(self, processor: ImageProcessor, thread: FairThread, config: ServerConfig, bodies: BodyBudget) -> None:
        """Files of images that wait for their turn on the `thread` take memory of the budget `bodies`."""
        self._processor = processor
        self._thread = thread
        self._limit = config.limit_mm_per_prompt.image
        self._largest = config.max_body_bytes
        self._bodies = bodies
        self.held = 0
        """Bytes of the images of running requests."""
        self._fetcher = MediaFetcher(
            config.allowed_media_domains, config.allowed_local_media_path, largest=config.max_body_bytes
        )

    def hold(self, size: int) -> None:
        """Count bytes of the images of a running request, or fewer if negative; `ApiError` (503) if they are too many.

        Images stay in memory until the request ends, because a preempted or requeued one needs them again.
        """
        if self.held + size > MAX_HELD_BYTES:
            raise unavailable(
                "the memory for images of running requests is full; retry later", "image_memory", retry_after=1
            )
        self.held += size

    async def read(self, images: Sequence[RequestedImage]) -> list[ProcessedImage]:
        """Return the processed images of a request, in order. Raises `BadRequest` that names the field, and `ApiError`.

        Images that still wait to be decoded when it is cancelled are dropped.
        """
        if len(images) > self._limit:
            message = (
                f"the request has {len(images)} images; at most {self._limit} are allowed, see --limit-mm-per-prompt"
            )
            raise BadRequest(message, field=images[self._limit].field)
        with self._bodies.share(None, self._largest) as share:
            process = self._processor.process if len(images) == 1 else self._processor.process_among
            tasks = [asyncio.create_task(self._read(image, share, process)) for image in images]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

    async def _read(self, image: RequestedImage, share: BodyShare, process: _Process) -> ProcessedImage:
        data = None
        if image.url[:5].lower() in ("http:", "https"):
            data = await self._fetcher.download(image.url, image.field, share)
        else:
            share.received(len(image.url))
        return await self._thread.run(partial(self._processed, image, data, process))

    def _processed(self, image: RequestedImage, data: bytes | None, process: _Process) -> ProcessedImage:
        return processed(process, self._fetcher.read(*image) if data is None else data, image.field)
