"""Images without a server: parts of messages, and data of prompts."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from PIL import Image

from fd_core.config import EngineConfig
from fd_core.engine import llm as llm_module
from fd_core.engine.building.assets import Assets
from fd_core.engine.llm import LLM
from fd_core.errors import BadRequest
from fd_core.models.families.images.idefics import Idefics3
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.text.tokenizer import byte_tokenizer
from fd_core.types import SamplingParams
from tests.server.preprocess.media.images import TEMPLATE, data_url, file_of
from tests.server.preprocess.media.test_image_texts import TileProcessor


class Tiles(TileProcessor):
    token_id = byte_tokenizer().encode("\x07")[0]


GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SOURCE = TEMPLATE.source.replace("\x01", "\x07")
FILES = [file_of(width=60, height=40, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    named = {"architectures": list(Idefics3.architectures), "torch_dtype": "float32", "vocab_size": 258}
    write_config({**Idefics3.defaults, **SIZES, **Idefics3.cases["plain"], **named}, folder, seed=4)
    config = EngineConfig(
        model="images", backend="reference", dtype="float32", block_size=8, num_kv_blocks=45, structured_output=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            llm_module,
            "find_assets",
            lambda _: Assets("images", folder, byte_tokenizer(), config=config, images=Tiles()),
        )
        found = LLM("images")
    yield found
    found.close()


def asked(llm: LLM, *parts: object) -> list[int]:
    content = [*parts, {"type": "text", "text": "What?"}]
    return llm.chat([{"role": "user", "content": content}], GREEDY, chat_template=SOURCE)[0].token_ids


def test_images_of_messages_and_of_prompts_decide_texts(llm: LLM) -> None:
    urls = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in FILES]
    pictures = [Image.open(io.BytesIO(data)) for data in FILES]
    one, two = asked(llm, urls[0]), asked(llm, *urls)
    assert one != asked(llm, urls[1])
    assert one == asked(llm, {"type": "image_pil", "image_pil": pictures[0]})
    assert one == asked(llm, {"type": "image_pil", "image_pil": FILES[0]})
    prompts = [
        {"prompt": "user:\x07What?", "multi_modal_data": {"image": pictures[0]}},
        {"prompt": "user:\x07\x07What?", "multi_modal_data": {"image": pictures}},
    ]
    assert [each.token_ids for each in llm.generate(prompts, GREEDY)] == [one, two]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("image_url", {"url": "http://example.org/a.png"}, "other URLs are not read offline"),
        ("image_url", "file:///etc/passwd", "other URLs are not read offline"),
        ("image_url", {"url": "data:image/png;base64,%%"}, "not valid base64"),
        ("image_pil", FILES[0][:50], "not a complete PNG"),
        ("image_pil", 7, "expected an image of Pillow"),
    ],
    ids=["http", "file", "base64", "truncated", "number"],
)
def test_other_images_are_rejected_with_their_field(llm: LLM, kind: str, value: object, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        asked(llm, {"type": kind, kind: value})
    assert caught.value.field == f"messages[0].content[0].{kind}"


def test_missing_placeholder_and_model_without_images_are_rejected(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="0 times for 1 images"):
        llm.generate({"prompt": "What?", "multi_modal_data": {"image": FILES[0]}}, GREEDY)
    with pytest.raises(BadRequest, match="image alone in multi_modal_data"):
        llm.generate({"prompt": "What?", "multi_modal_data": {"video": FILES[0]}}, GREEDY)
    other = LLM("null", backend="null")
    with pytest.raises(BadRequest, match="null takes no images"):
        asked(other, {"type": "image_pil", "image_pil": FILES[0]})
    other.close()
