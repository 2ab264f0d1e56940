"""Multipart forms with files, for any chunk boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.http.errors import ApiError
from fd_core.server.batches.routes import boundary_of, read_form


def body_of(fields: dict[str, bytes], boundary: bytes = b"b") -> bytes:
    parts = [
        b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\nX: y\r\n\r\n%s\r\n'
        % (boundary, name.encode(), content)
        for name, content in fields.items()
    ]
    return b"".join(parts) + b"--%s--\r\n" % boundary


@given(st.dictionaries(st.text("abc", min_size=1, max_size=5), st.binary(max_size=50), min_size=1, max_size=5))
def test_fields_are_located_in_the_body(fields: dict[str, bytes]) -> None:
    boundary = b"0123456789abcdef0123456789"
    body = body_of(fields, boundary)
    assert {name: body[each.begin : each.end] for name, each in read_form(body, boundary).items()} == fields


@pytest.mark.parametrize("cut", range(len(body_of({"a": b"xyz", "b": b""})) - 4))
def test_truncated_form_is_rejected(cut: int) -> None:
    with pytest.raises(ApiError):
        read_form(body_of({"a": b"xyz", "b": b""})[:cut], b"b")


@pytest.mark.parametrize(
    ("kind", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('multipart/form-data; charset=x; boundary="a b"', b"a b"),
        ("multipart/form-data", None),
        ("application/json; boundary=abc", None),
        ("", None),
    ],
)
def test_content_type_names_the_boundary(kind: str, boundary: bytes | None) -> None:
    assert boundary_of(kind) == boundary


@pytest.mark.parametrize("boundary", ["", '""', "a" * 71, "\xff", '"a "', '"a\x01"'])
def test_invalid_boundary_is_rejected(boundary: str) -> None:
    with pytest.raises(ApiError, match="1 to 70") as caught:
        boundary_of(f"multipart/form-data; boundary={boundary}")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("disposition", "filename"),
    [
        (b"filename=a.jsonl", "a.jsonl"),
        (b'filename="a\\"b; c"', 'a"b; c'),
        ('filename="ä"'.encode(), "ä"),
        (b'filename="\xff"', "\ufffd"),
        (b"filename=x; filename*=UTF-8''%C3%A4%ff", "ä\ufffd"),
        (b"filename*=utf-7''a", None),
        (b"x=y", None),
    ],
)
def test_file_names_are_utf_8(disposition: bytes, filename: str | None) -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="file"; %b\r\n\r\nx\r\n--b--' % disposition
    assert read_form(body, b"b")["file"].filename == filename


@pytest.mark.parametrize("offset", range(-6, 2))
def test_boundary_across_slices_is_found(offset: int) -> None:
    content = b"x" * ((1 << 20) + offset)
    body = body_of({"a": content, "b": b"y"})
    assert [body[each.begin : each.end] for each in read_form(body, b"b").values()] == [content, b"y"]
