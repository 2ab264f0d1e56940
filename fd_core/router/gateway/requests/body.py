"""Bodies of requests, read within bounds."""

from __future__ import annotations

from aiohttp import web

from fd_core.http.bodies import BodyShare
from fd_core.http.errors import ApiError
from fd_core.http.headers import refuse_encoding

__all__ = ["read_body"]


async def read_body(request: web.BaseRequest, share: BodyShare) -> bytes:
    """Return the body. Raises `ApiError`: 415 if it is compressed, 400 if it breaks off, and beyond its share."""
    refuse_encoding(request.headers.getall("Content-Encoding", []))
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    parts: list[bytes] = []
    try:
        while part := await request.content.readany():
            share.received(len(part))
            parts.append(part)
    except web.RequestPayloadError as error:
        raise ApiError(400, "the body broke off or is not framed as announced", code="invalid_body") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)
