"""Decoding: the pixels are those of `transformers`; damaged, foreign and huge files are errors of the client."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from fd_core.errors import BadRequest
from fd_core.text import image_files
from fd_core.text.image_files import decoded
from tests.server.preprocess.media.images import file_of

FIELD = "messages[0].content[1].image_url.url"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_pixels_equal_those_of_transformers(kind: str, mode: str) -> None:
    load_image = pytest.importorskip("transformers.image_utils").load_image
    if (kind, mode) == ("JPEG", "RGBA"):
        pytest.skip("JPEG has no alpha")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    data = file_of(kind, 17, 9, mode, **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP") else {}))
    found = decoded(data, FIELD)
    assert found.shape == ((17, 9, 3) if kind in ("PNG", "JPEG", "WEBP") else (9, 17, 3))
    assert np.array_equal(found, np.asarray(load_image(base64.b64encode(data).decode())))


def test_first_frame_of_an_animation_is_decoded() -> None:
    file = io.BytesIO()
    first, second = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    first.save(file, "GIF", save_all=True, append_images=[second])
    assert (decoded(file.getvalue(), FIELD) == (255, 0, 0)).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_truncated_file_is_rejected_with_its_field(kind: str, share: float) -> None:
    data = file_of(kind, 64, 64)
    with pytest.raises(BadRequest, match="not a complete") as caught:
        decoded(data[: int(len(data) * share)], FIELD)
    assert caught.value.field == FIELD


@pytest.mark.parametrize("data", [b"%PDF-1.7 ...", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"II*\0" + bytes(64)])
def test_other_types_are_rejected(data: bytes) -> None:
    with pytest.raises(BadRequest, match="not a complete PNG, JPEG, WebP, GIF or BMP"):
        decoded(data, FIELD)


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few hundred bytes whose header has these sizes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(8192, 6145), (12_000, 12_000), (60_000, 60_000)])
def test_bomb_is_rejected_before_it_is_decoded(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(BadRequest, match="pixels") as caught:
        decoded(bomb(*size), FIELD)
    assert caught.value.field == FIELD and f"{image_files.MAX_PIXELS:,}" in str(caught.value)
