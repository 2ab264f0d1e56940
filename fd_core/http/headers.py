"""Values of headers, read in linear time and without codecs that the client chooses."""

from __future__ import annotations

import os
import re
from typing import Final

from fd_core.http.errors import ApiError

_MOST_DIGITS: Final = 18
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_SHOWN: Final = re.compile(r"[A-Za-z0-9_*, -]{1,64}")


def request_id_of(given: bytes) -> bytes:
    """Return the client's X-Request-Id if it is usable, else a fresh one."""
    return given if given and _REQUEST_ID.fullmatch(given) else os.urandom(16).hex().encode()


def length_of(value: str | None) -> int | None:
    """Return the number of a Content-Length header; None without one that can be read."""
    if value is None or not (value.isascii() and value.isdecimal()):
        return None
    digits = value.lstrip("0") or "0"
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS


def refuse_encoding(values: list[str]) -> None:
    """Raise `ApiError` (415) unless a body is uncompressed; `values` are those of its Content-Encoding headers."""
    coding = ", ".join(values).strip()
    if coding.lower() not in ("", "identity"):
        shown = coding if _SHOWN.fullmatch(coding) else "of the request"
        message = f"the content-encoding {shown} is not supported; send the body uncompressed"
        raise ApiError(415, message, code="unsupported_content_encoding", headers={"Accept-Encoding": "identity"})
