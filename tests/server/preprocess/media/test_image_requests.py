"""Images of every API reach the engine at their places; errors name the field of the client's request."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import msgspec
import pytest

from fd_core.config import MediaLimits
from fd_core.server.preprocess.media import reader
from fd_core.text.image_files import decoded
from fd_core.types import RequestSpec
from tests.server.fakes import FakeClient, LiveServer, live
from tests.server.preprocess.media.images import TEMPLATE, SmallProcessor, data_url, file_of

ONE, TWO = file_of(), file_of("JPEG", 8, 8, seed=1)
ENCODED = [base64.b64encode(data).decode() for data in (ONE, TWO)]
CHAT_PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": data_url(ONE), "detail": "low"}},
    {"type": "text", "text": "b"},
    {"type": "image_url", "image_url": data_url(TWO, "image/gif")},
]
PROMPT = b"user:a[\x01\x01]b[\x01]"
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": CHAT_PARTS}]},
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"},
                    {"type": "input_text", "text": "b"},
                    {"type": "input_image", "image_url": data_url(TWO)},
                ],
            }
        ]
    },
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 5,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED[0]}},
                    {"type": "text", "text": "b"},
                    {"type": "image", "source": {"type": "url", "url": data_url(TWO)}},
                ],
            }
        ],
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(images=SmallProcessor(), template=TEMPLATE, limit_mm_per_prompt=MediaLimits(image=3)) as running:
        yield running


def spec_of(server: LiveServer, path: str, body: dict[str, Any]) -> RequestSpec:
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    spec: RequestSpec = server.call(server.client.specs.pop)
    return spec


def check(spec: RequestSpec, prompt: bytes, *files: bytes) -> None:
    assert bytes(spec.prompt) == prompt
    assert [image.pixels for image in spec.images] == [decoded(data, "").tobytes() for data in files]
    assert [(image.start, image.end) for image in spec.images] == [(7, 9), (12, 13)][: len(files)]


@pytest.mark.parametrize("path", APIS)
def test_images_reach_the_engine_at_their_places(server: LiveServer, path: str) -> None:
    check(spec_of(server, path, APIS[path]), PROMPT, ONE, TWO)


_CALL = {"name": "look", "arguments": "{}"}
RESULTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": _CALL}]},
            {"role": "tool", "tool_call_id": "1", "content": CHAT_PARTS[1:3]},
        ]
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "1", **_CALL},
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [
                    {"type": "input_image", "image_url": data_url(ONE)},
                    {"type": "input_text", "text": "b"},
                ],
            },
        ]
    },
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": data_url(ONE)}},
                            {"type": "text", "text": "b"},
                        ],
                    }
                ],
            },
        ],
    },
}


@pytest.mark.parametrize("path", RESULTS)
def test_results_of_tools_may_contain_images(server: LiveServer, path: str) -> None:
    spec = spec_of(server, path, RESULTS[path])
    assert b"<tool_response>\n[\x01\x01]b" in bytes(spec.prompt)
    assert [image.pixels for image in spec.images] == [decoded(ONE, "").tobytes()]


def test_images_of_ollama_precede_their_text(server: LiveServer) -> None:
    chat = {"model": "fake", "stream": False, "messages": [{"role": "user", "content": "a", "images": ENCODED[:1]}]}
    plain = {"model": "fake", "stream": False, "prompt": "a", "images": ENCODED[:1]}
    for path, body in (("/api/chat", chat), ("/api/generate", plain)):
        spec = spec_of(server, path, body)
        assert bytes(spec.prompt) == b"user:[\x01\x01]a" and spec.images[0].start == 6
    assert "vision" in server.post("/api/show", {"model": "fake"}).json["capabilities"]


def test_template_of_texts_gets_the_placeholder_between_lines() -> None:
    with live(images=SmallProcessor()) as server:
        spec = spec_of(server, "/v1/chat/completions", APIS["/v1/chat/completions"])
        assert bytes(spec.prompt) == b"user: a\n[\x01\x01]\nb\n[\x01]\nassistant: "


def test_counts_include_tokens_of_images(server: LiveServer) -> None:
    counted = {"model": "fake", "messages": APIS["/v1/messages"]["messages"]}
    assert server.post("/v1/messages/count_tokens", counted).json["input_tokens"] == len(PROMPT)
    assert server.post("/tokenize", APIS["/v1/chat/completions"]).json["tokens"] == [*PROMPT]


def part_of(url: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", part_of({"url": data_url(b"%PDF")}), "messages[0].content[0].image_url.url"),
        ("/v1/chat/completions", part_of(data_url(ONE[:-60])), "messages[0].content[0].image_url"),
        ("/v1/chat/completions", part_of({"url": "http://a.example/x"}), "messages[0].content[0].image_url.url"),
        ("/v1/chat/completions", part_of({"url": "file:///etc/passwd"}), "messages[0].content[0].image_url.url"),
        ("/v1/chat/completions", part_of(None), "messages[0].content[0].image_url"),
        ("/v1/chat/completions", part_of({"url": data_url(ONE)}) | {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/chat/completions", part_of(data_url(ONE)) | {"truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [*CHAT_PARTS, *CHAT_PARTS]}]},
            "messages[0].content[7].image_url",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\x01"}, CHAT_PARTS[1]]}]},
            "messages",
        ),
        (
            "/v1/responses",
            {"instructions": "x", "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            "/v1/messages",
            {
                "model": "fake",
                "max_tokens": 5,
                "system": "x",
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "?"}}]}
                ],
            },
            "messages[0].content[0].source.data",
        ),
        (
            "/api/chat",
            {"model": "fake", "messages": [{"role": "user", "content": "a", "images": [ENCODED[0], "?"]}]},
            "messages[0].images[1]",
        ),
    ],
)
def test_error_names_the_field_of_the_request(server: LiveServer, path: str, body: dict[str, Any], field: str) -> None:
    answer = server.post(path, body)
    assert answer.status == 400 and field in answer.body.decode(), answer.body
    assert "etc/passwd" not in answer.body.decode()


def test_model_without_a_processor_takes_no_images() -> None:
    with live() as server:
        error = server.post("/v1/chat/completions", part_of({"url": data_url(ONE)})).error
        assert error["param"] == "messages[0].content[0].image_url.url" and "takes no images" in error["message"]


class SlowProcessor(SmallProcessor):
    """Takes as long as the test wants."""

    def __init__(self) -> None:
        self.entered, self.goes_on, self.count = threading.Event(), threading.Event(), 0

    def process(self, pixels):  # type: ignore[no-untyped-def]
        self.count += 1
        self.entered.set()
        assert self.goes_on.wait(60)
        return super().process(pixels)


def test_images_of_a_client_that_left_are_not_decoded() -> None:
    processor = SlowProcessor()
    with live(images=processor, template=TEMPLATE) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        content = [*CHAT_PARTS, *CHAT_PARTS, *CHAT_PARTS]
        body = msgspec.json.encode({"messages": [{"role": "user", "content": content}]})
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        assert processor.entered.wait(60)
        # Texts do not wait for images, of which the first one waits for this test.
        assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).status == 200
        connection.close()
        deadline = time.monotonic() + 60
        while server.get("/metrics").body.count(b"fdcore_body_memory_bytes 0.0") != 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        processor.goes_on.set()
        assert len(spec_of(server, "/v1/chat/completions", APIS["/v1/chat/completions"]).images) == 2
        assert (
            processor.count == 3 and len(server.client.specs) == 1
        )  # one that had begun, and those of the last request


def test_images_of_running_requests_take_memory_until_they_end(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = APIS["/v1/chat/completions"]
    assert server.post("/v1/chat/completions", body).status == 200
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", 500)
    assert server.post("/v1/chat/completions", body).error["code"] == "image_memory"
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", 600)  # 16 x 8 and 8 x 8 pixels
    assert server.post("/v1/chat/completions", body | {"stream": True}).status == 200
    assert server.post("/v1/chat/completions", body).status == 200


def test_waiting_images_take_memory_of_bodies() -> None:
    processor = SlowProcessor()
    size = 200_000
    with live(FakeClient, images=processor, max_body_bytes=size, max_body_memory=size) as server:
        large = part_of(data_url(file_of("BMP", 217, 217)))
        sending = threading.Thread(target=server.post, args=("/v1/chat/completions", large))
        sending.start()
        assert processor.entered.wait(60)
        error = server.post("/v1/chat/completions", large).error
        assert error["code"] == "body_memory"
        processor.goes_on.set()
        sending.join(60)
