"""Images of HTTP requests decide the texts of a model that reads them, and are found in its prefix cache."""

from __future__ import annotations

from pathlib import Path

from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.models.families.image_processor import ImageProcessor, Pixels, ProcessedImage, image_part
from fd_core.models.families.images.idefics import Idefics3
from fd_core.models.families.images.resizing import BICUBIC, resized
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.text.chat_template import ChatTemplate
from tests.server.fakes import Answer, live
from tests.server.preprocess.media.images import TEMPLATE, data_url, file_of

TOKENS = 16


class TileProcessor(ImageProcessor):
    """Makes a tile of 48 by 48 pixels of every image; token 7 is byte 7."""

    placeholder, token_id, max_tokens = "\x07", 7, TOKENS

    def process(self, pixels: Pixels) -> ProcessedImage:
        tile = resized(pixels, 48, 48, BICUBIC)
        return ProcessedImage("\x07" * TOKENS, (image_part(tile, TOKENS),))


def test_images_decide_texts_and_are_cached(tmp_path: Path) -> None:
    named = {"architectures": list(Idefics3.architectures), "torch_dtype": "float32", "vocab_size": 258}
    write_config({**Idefics3.defaults, **SIZES, **Idefics3.cases["plain"], **named}, tmp_path, seed=4)

    async def client() -> EngineClient:
        config = EngineConfig(
            model="images",
            backend="reference",
            dtype="float32",
            block_size=8,
            num_kv_blocks=45,
            max_model_len=128,
            structured_output=False,
        )
        return await open_client(config, tmp_path, where="inproc")

    def part(seed: int) -> dict[str, object]:
        return {"type": "image_url", "image_url": {"url": data_url(file_of(width=60, height=40, seed=seed))}}

    with live(client, images=TileProcessor(), template=ChatTemplate(TEMPLATE.source.replace("\x01", "\x07"))) as server:

        def asked(*seeds: int) -> Answer:
            content = [{"type": "text", "text": "What is it?"}, *map(part, seeds), {"type": "text", "text": "!"}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0}
            return server.post("/v1/chat/completions", body | {"ignore_eos": True, "return_token_ids": True})

        one, other, again, two = asked(1), asked(2), asked(1), asked(1, 2)
        texts = [each.json["choices"][0]["token_ids"] for each in (one, other, again, two)]
        assert texts[0] == texts[2] and texts[0] != texts[1] and texts[0] != texts[3]
        cached = [each.json["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (one, other, again, two)]
        assert cached == [0, 16, 32, 32]  # "user:What is it?", and the first image
