"""Multipart forms with files, for any chunk boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_multipart.exceptions import FormParserError

from fd_core.http.errors import ApiError
from fd_core.server.batches.routes import UploadForm


class Written:
    def __init__(self) -> None:
        self.content = b""

    def write(self, part: bytes) -> None:
        self.content += part


def body_of(content: bytes, disposition: bytes = b'name="file"; filename="f"') -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    return head + b"--b\r\nX: y\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n--b--\r\n" % (disposition, content)


def read(body: bytes, size: int = 1000) -> tuple[str, bytes]:
    form = UploadForm(b"b", written := Written())  # type: ignore[arg-type]
    for begin in range(0, len(body), size):
        form.write(body[begin : begin + size])
    return form.filename_of_batch(), written.content


@given(st.binary(max_size=50) | st.text("\r\n-b", max_size=20).map(str.encode), st.integers(1, 40))
def test_file_is_written_as_it_arrives(content: bytes, size: int) -> None:
    content = content.replace(b"\n--b", b"")
    assert read(body_of(content), size) == ("f", content)


@pytest.mark.parametrize("cut", range(len(body_of(b"xyz")) - 4))
def test_truncated_form_is_rejected(cut: int) -> None:
    with pytest.raises(FormParserError):
        read(body_of(b"xyz")[:cut])


def test_second_file_and_too_many_fields_are_rejected() -> None:
    for body in (body_of(b"x").removesuffix(b"--b--\r\n") + body_of(b"y"), b"--b\r\n\r\n\r\n" * 33):
        with pytest.raises(FormParserError):
            read(body)


def test_expiry_is_rejected() -> None:
    body = body_of(b"x").removesuffix(b"--b--\r\n")
    field = b'--b\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600\r\n--b--\r\n'
    with pytest.raises(ApiError, match="expires_after is not supported") as caught:
        read(body + field)
    assert caught.value.param == "expires_after"


@pytest.mark.parametrize(
    ("disposition", "filename"),
    [
        (b"filename=a.jsonl", "a.jsonl"),
        (b'filename="a\\"b; c"', 'a"b; c'),
        ('filename="ä"'.encode(), "ä"),
        (b'filename="\xff"', "\ufffd"),
    ],
)
def test_file_names_are_utf_8(disposition: bytes, filename: str) -> None:
    assert read(body_of(b"x", b"name=file; " + disposition)) == (filename, b"x")
