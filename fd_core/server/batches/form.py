"""Forms with files, multipart/form-data: where each field lies in the bytes of a body. Nothing is copied."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser
from mmap import mmap
from typing import Final, NamedTuple

from fd_core.server.errors import invalid

__all__ = ["FormField", "boundary_of", "read_form"]

_MOST_FIELDS: Final = 32
_LONGEST_HEAD: Final = 8192


class FormField(NamedTuple):
    """One field: its content is `body[begin:end]`."""

    begin: int
    end: int
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """Return what separates the fields of a body; None if the body is no form with files."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    return boundary.encode() if header.get_content_type() == "multipart/form-data" and boundary else None


def read_form(body: bytes | mmap, boundary: bytes) -> dict[str, FormField]:
    """Return the fields of a form by name. Raises `ApiError` (400) if it is malformed."""
    line = b"--" + boundary
    fields: dict[str, FormField] = {}
    at = body.find(line)
    while at >= 0:
        at += len(line)
        if body[at : at + 2] == b"--":
            return fields
        head_end = body.find(b"\r\n\r\n", at, at + _LONGEST_HEAD)
        end = body.find(b"\r\n" + line, max(head_end, at))
        if body[at : at + 2] != b"\r\n" or head_end < 0 or end < 0 or len(fields) == _MOST_FIELDS:
            break
        head = BytesHeaderParser().parsebytes(body[at + 2 : head_end + 2])
        name = head.get_param("name", header="content-disposition")
        if isinstance(name, str):
            fields[name] = FormField(min(head_end + 4, end), end, head.get_filename())
        at = end + 2
    raise invalid("the form is malformed or cut off", None, "invalid_form")
