"""Forms with files, multipart/form-data: where each field lies in the bytes of a body. Nothing is copied."""

from __future__ import annotations

import re
from mmap import mmap
from typing import Final, NamedTuple
from urllib.parse import unquote

from fd_core.http.errors import invalid
from fd_core.http.headers import parameters

_MOST_FIELDS: Final = 32
_LONGEST_HEAD: Final = 8192
_BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
"""RFC 2046, section 5.1.1."""
_SLICE: Final = 1 << 20


class FormField(NamedTuple):
    """One field: its content is `body[begin:end]`."""

    begin: int
    end: int
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """Return what separates the fields of a body; None if the body is no form with files.

    Raises `ApiError` (400) for a boundary that no form may have.
    """
    kind, given = parameters(content_type)
    if kind != "multipart/form-data" or "boundary" not in given:
        return None
    if not _BOUNDARY.fullmatch(given["boundary"]):
        raise invalid("the boundary of a form has 1 to 70 letters of ASCII (RFC 2046)", None, "invalid_form")
    return given["boundary"].encode()


def read_form(body: bytes | mmap, boundary: bytes) -> dict[str, FormField]:
    """Return the fields of a form by name. Raises `ApiError` (400) if it is malformed."""
    line = b"--" + boundary
    fields: dict[str, FormField] = {}
    at = _find(body, line, 0)
    while at >= 0:
        at += len(line)
        if body[at : at + 2] == b"--":
            return fields
        head_end = body.find(b"\r\n\r\n", at, at + _LONGEST_HEAD)
        if body[at : at + 2] != b"\r\n" or head_end < 0 or len(fields) == _MOST_FIELDS:
            break
        end = _find(body, b"\r\n" + line, head_end)
        if end < 0:
            break
        name, filename = _names(body[at + 2 : head_end])
        if name is not None:
            fields[name] = FormField(min(head_end + 4, end), end, filename)
        at = end + 2
    raise invalid("the form is malformed or cut off", None, "invalid_form")


def _find(body: bytes | mmap, wanted: bytes, begin: int) -> int:
    """Find bytes in slices: each holds the interpreter for a moment, and in linear time, as `mmap.find` does not."""
    for at in range(begin, len(body), _SLICE):
        found = body[at : at + _SLICE + len(wanted) - 1].find(wanted)
        if found >= 0:
            return at + found
    return -1


def _names(head: bytes) -> tuple[str | None, str | None]:
    """Return the names of a field and of its file, None for each that is not given."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        title, _, value = line.partition(":")
        if title.strip().lower() == "content-disposition":
            given = parameters(value)[1]
            charset, _, coded = given.get("filename*", "").partition("'")
            if charset.lower() == "utf-8":  # RFC 8187; the other charsets are no longer sent
                given["filename"] = unquote(coded.partition("'")[2], errors="replace")
            return given.get("name"), given.get("filename")
    return None, None
