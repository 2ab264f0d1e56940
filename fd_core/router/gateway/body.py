"""Bodies of requests, read within bounds."""

from __future__ import annotations

from aiohttp import web

from fd_core.server.errors import ApiError

__all__ = ["read_body"]


async def read_body(request: web.BaseRequest, limit: int) -> bytes:
    """Return the body. Raises `ApiError` (413) beyond `limit` bytes, before they are kept, and 400 if it breaks off."""
    announced = request.content_length
    if announced is not None and announced > limit:
        raise _too_large(limit)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    parts: list[bytes] = []
    size = 0
    try:
        while part := await request.content.readany():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except web.RequestPayloadError as error:
        raise ApiError(400, "the body broke off or is not framed as announced", code="invalid_body") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the {limit:,} bytes allowed", code="body_too_large")
