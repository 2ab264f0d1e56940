"""Forms with files, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.server.batches.form import boundary_of, read_form
from fd_core.server.errors import ApiError


def body_of(fields: dict[str, bytes], boundary: bytes = b"b") -> bytes:
    parts = [
        b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\nX: y\r\n\r\n%s\r\n'
        % (boundary, name.encode(), content)
        for name, content in fields.items()
    ]
    return b"".join(parts) + b"--%s--\r\n" % boundary


@given(st.dictionaries(st.text("abc", min_size=1, max_size=5), st.binary(max_size=50), min_size=1, max_size=5))
def test_fields_are_found_where_they_lie(fields: dict[str, bytes]) -> None:
    boundary = b"0123456789abcdef0123456789"
    body = body_of(fields, boundary)
    assert {name: body[each.begin : each.end] for name, each in read_form(body, boundary).items()} == fields


@pytest.mark.parametrize("cut", range(len(body_of({"a": b"xyz", "b": b""})) - 4))
def test_a_form_that_is_cut_off_is_refused(cut: int) -> None:
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
def test_the_content_type_names_the_boundary(kind: str, boundary: bytes | None) -> None:
    assert boundary_of(kind) == boundary
