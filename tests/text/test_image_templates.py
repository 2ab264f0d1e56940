"""Images in conversations: templates get parts or texts, whichever they take, and images get their places."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from fd_core.errors import BadRequest
from fd_core.models.families.image_processor import ImageProcessor, Pixels, ProcessedImage, image_part
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.prompt_reader import PromptReader, find_text

SMOLVLM: Final = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's, which takes parts only."""
QWEN: Final = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'image' or 'image_url' in part %}<image>{% elif 'text' in part %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
"""As Qwen2-VL's, which takes both."""
TEXTS: Final = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
BYTES: Final = find_text("bytes", offline=True).tokenizer
IMAGE: Final = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


TURNS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": [IMAGE, text("What?\n"), IMAGE, IMAGE, text("And?"), text("Well?")]},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": ""},
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            SMOLVLM,
            "<|im_start|>User:<image>What?\n<image><image>And?\nWell?<end_of_utterance>\n"
            "Assistant: A cat.<end_of_utterance>\nUser: <end_of_utterance>\nAssistant:",
        ),
        (QWEN, "<user><image>What?\n<image><image>And?\nWell?<assistant>A cat.<user>"),
        (TEXTS, "<user><image>\nWhat?\n\n<image>\n<image>\nAnd?\nWell?<assistant>A cat.<user>"),
    ],
)
def test_template_gets_what_it_takes(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(TURNS, image_text="<image>") == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [(SMOLVLM, "<|im_start|>User: hi<end_of_utterance>\nAssistant:"), (QWEN, "<user>hi"), (TEXTS, "<user>hi")],
)
def test_texts_without_images_are_rendered_by_every_template(source: str, expected: str) -> None:
    for content in ("hi", [text("hi")]):
        assert ChatTemplate(source).render([{"role": "user", "content": content}]) == expected


def test_last_message_with_an_image_is_continued() -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [IMAGE, text("It is")]}]
    for source in (SMOLVLM, QWEN):
        rendered = ChatTemplate(source).render(turns, None, False, image_text="<image>", continue_final_message=True)
        assert rendered.endswith("<image>It is")


def test_image_is_rejected_without_a_processor() -> None:
    with pytest.raises(BadRequest, match="only type 'text'") as caught:
        ChatTemplate(QWEN).render([{"role": "user", "content": [IMAGE]}])
    assert caught.value.field == "messages[0].content[0].type"


class TwoTokens(ImageProcessor):
    placeholder, token_id, max_tokens = "<image>", BYTES.encode("#")[0], 2

    def process(self, pixels: Pixels) -> ProcessedImage:
        return ProcessedImage("[##]", (image_part(pixels, 2),))


@pytest.mark.parametrize(("source", "starts"), [(QWEN, [7, 16]), (TEXTS, [7, 18])])
def test_reader_places_images(source: str, starts: list[int]) -> None:
    reader = PromptReader(BYTES, ChatTemplate(source), images=TwoTokens())
    images = [TwoTokens().process(np.full((4, 4, 3), shade, np.uint8)) for shade in (1, 2)]
    parts = [IMAGE, text("What?"), IMAGE]
    found = reader.chat([{"role": "user", "content": parts}], images=images)
    assert [(image.start, image.pixels[0]) for image in found.images] == list(zip(starts, (1, 2), strict=True))
    for hostile in ("<image>", "#"):
        with pytest.raises(BadRequest, match="contain") as caught:
            reader.chat([{"role": "user", "content": [*parts, text(hostile)]}], images=images)
        assert caught.value.field == "messages"
    assert not reader.chat([{"role": "user", "content": "<image>"}]).images
    reader.close()
