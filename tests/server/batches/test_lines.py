"""Lines of batch files: requests, and errors of malformed lines."""

from __future__ import annotations

import codecs
import io
import json
import re
from typing import Any

import msgspec
import pytest

from fd_core.server.batches.lines import BatchAnswer, BatchLine, answered, as_line, failed, read_requests

BODY = {"messages": [{"role": "user", "content": "hi"}]}


def line(**changes: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY} | changes


def read(*lines: Any, longest: int = 10_000, endpoint: str | None = None) -> list[Any]:
    data = b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)
    return list(read_requests(io.BytesIO(data), longest, endpoint))


def test_request_body_is_kept_verbatim() -> None:
    raw = b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt" : "a", "n": 1.0}}'
    (request,) = read(raw)
    assert (request.number, request.custom_id, request.url) == (1, "x", "/v1/completions")
    assert request.body == b'{"prompt" : "a", "n": 1.0}'
    assert request.error is None


def test_blank_lines_count_and_last_newline_is_optional() -> None:
    data = json.dumps(line()).encode() + b"\n\n  \n" + json.dumps(line(custom_id="b")).encode()
    found = list(read_requests(io.BytesIO(data), 10_000))
    assert [(each.number, each.custom_id) for each in found] == [(1, "a"), (4, "b")]


def test_byte_order_mark_before_the_first_line_is_skipped() -> None:
    first, second = read(codecs.BOM_UTF8 + json.dumps(line()).encode(), codecs.BOM_UTF8 + b"{}")
    assert (first.error, first.custom_id) == (None, "a")
    assert second.error.code == "invalid_line"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (b"{", "invalid_line"),
        (b"\xff", "invalid_line"),
        (b"[" * 5000, "invalid_line"),
        ({"custom_id": "a"}, "invalid_line"),
        (line(custom_id=5), "invalid_line"),
        (line(custom_id=""), "invalid_custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/abort_requests"), "invalid_url"),
        (line(url="http://elsewhere/v1/completions"), "invalid_url"),
        (line(body=[1]), "invalid_body"),
        (line(body={**BODY, "stream": True}), "invalid_body"),
        (line(body={"x": "y" * 20_000}), "line_too_long"),
    ],
)
def test_malformed_line_is_reported_and_the_next_one_read(wrong: Any, code: str) -> None:
    first, second = read(wrong, line(custom_id="b"))
    assert first.error.code == code
    assert first.error.message.startswith("line 1: ")
    assert (second.number, second.error) == (2, None)


def test_custom_id_is_used_once() -> None:
    one, two = read(line(), line())
    assert one.error is None
    assert "line 1" in two.error.message


def test_line_with_another_endpoint_is_rejected() -> None:
    (request,) = read(line(), endpoint="/v1/completions")
    assert request.error.code == "invalid_url"


def test_answer_is_one_line_in_openai_format() -> None:
    (request,) = read(line())
    text = as_line(answered(request, 200, "r1", b'{"id":"x"}'))
    assert text.count(b"\n") == 1 and text.endswith(b"\n")
    assert json.loads(text) == {
        "id": request.id,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r1", "body": {"id": "x"}},
        "error": None,
    }
    assert re.fullmatch(r"batch_req_00000001_[0-9a-f]{16}", request.id)
    (wrong,) = read(b"x")
    back = msgspec.json.decode(msgspec.json.encode(failed(wrong, wrong.error)), type=BatchAnswer)
    assert (back.ok, back.custom_id, back.response, back.error) == (False, None, None, wrong.error)


def test_no_reader_splits_a_line_within_its_text() -> None:
    text = "a\u2028b\u2029c\x85d\u0085\x0be\x0cf\x1cé"
    line = as_line(answered(BatchLine(1, "a"), 200, "r", json.dumps(text, ensure_ascii=False).encode()))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["response"]["body"] == text
