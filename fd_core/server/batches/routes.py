"""/v1/files and /v1/batches, compatible with OpenAI's. Each key sees only its own files and batches."""

from __future__ import annotations

import mmap
import re
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import unquote

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fd_core.http.errors import ApiError, invalid
from fd_core.http.headers import length_of, parameters, refuse_encoding
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.batches.lines import ENDPOINTS
from fd_core.server.batches.running import in_thread
from fd_core.server.batches.service import BatchService
from fd_core.server.batches.store import BatchStore, StoredBatch, StoredContent, StoredFile, cannot_keep
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.state import state_of

router = APIRouter(route_class=DirectRoute)

_METADATA_BYTES: Final = 16 * 1024
_FILES_PER_PAGE: Final = 1000
_BATCHES_PER_PAGE: Final = 100
"""A page may be smaller than its `limit`: encoding it must not delay other streams."""
_PART_BYTES: Final = 1 << 18
_BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
"""Boundary of a form; RFC 2046, section 5.1.1."""
_SLICE: Final = 1 << 20


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": list(ENDPOINTS)})]
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, Any] | None = None


class FileList(msgspec.Struct, kw_only=True):
    """Files, the newest first."""

    object: str = "list"
    data: list[StoredFile]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class BatchList(msgspec.Struct, kw_only=True):
    """Batches, the newest first."""

    object: str = "list"
    data: list[StoredBatch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class DeletedFile(msgspec.Struct):
    """Result of deleting a file."""

    id: str
    object: str = "file"
    deleted: bool = True


_BODY: Final = BodyFormat(BatchRequest)
_EXAMPLE: Final = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


@router.post("/v1/files", include_in_schema=False)
async def upload(request: Request) -> Response:
    """Store the file of a form with the fields `purpose` and `file`."""
    store, owner = await _store(request), request.state.owner
    refuse_encoding(request.headers.getlist("content-encoding"))
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise ApiError(415, "the file must be sent as multipart/form-data", code="unsupported_media_type")
    store.bytes.require(owner, length_of(request.headers.get("content-length")) or 0)
    try:
        with store.upload(owner) as upload:
            async for part in request.stream():
                upload.reserve(len(part))
                await in_thread(partial(upload.write, part))
            begin, size, filename = await in_thread(partial(_read_form, upload.path, boundary, upload.size))
            await in_thread(partial(upload.cut, begin, size))
            found = upload.keep(size, filename, "batch")
    except ClientDisconnect:
        raise invalid("the client disconnected before the body was complete", None, "invalid_body") from None
    except OSError as error:
        raise cannot_keep(error) from error
    return json_response(found)


@router.get("/v1/files", **endpoint("List files", None, FileList, errors=(400, 401)))
async def list_files(
    request: Request, purpose: str | None = None, limit: str | None = None, after: str | None = None
) -> Response:
    """List files, the newest first."""
    store = await _store(request)
    page = store.files.page(request.state.owner, _limit(limit, _FILES_PER_PAGE), after, kind=purpose)
    return json_response(FileList(**_page(page, after)))


@router.get("/v1/files/{file_id}", **endpoint("Describe a file", None, StoredFile, errors=(401, 404)))
async def get_file(request: Request, file_id: str) -> Response:
    """Describe a file."""
    return json_response((await _store(request)).file(file_id, request.state.owner))


@router.get("/v1/files/{file_id}/content", include_in_schema=False)
async def get_content(request: Request, file_id: str) -> Response:
    """Return the content of a file."""
    return _ContentResponse((await _store(request)).read(file_id, request.state.owner))


@router.delete("/v1/files/{file_id}", **endpoint("Delete a file", None, DeletedFile, errors=(400, 401, 404)))
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file that is not in use by a batch."""
    (await _store(request)).delete(file_id, request.state.owner)
    return json_response(DeletedFile(file_id))


@router.post("/v1/batches", **endpoint("Create a batch", BatchRequest, StoredBatch, example=_EXAMPLE))
async def create_batch(request: Request) -> Response:
    """Start processing the requests of a file."""
    store, owner = await _store(request), request.state.owner
    _, body, headers = await _BODY.read(request)
    if body.endpoint not in ENDPOINTS:
        raise invalid(
            f"endpoint is {body.endpoint[:80]!r}; expected {', '.join(ENDPOINTS)}", "endpoint", "invalid_value"
        )
    if len(msgspec.json.encode(body.metadata)) > _METADATA_BYTES:
        raise invalid(f"metadata exceeds {_METADATA_BYTES:,} bytes", "metadata")
    if store.files.get(body.input_file_id, owner) is None:
        missing = body.input_file_id[:64]
        raise invalid(f"file {missing!r} does not exist; upload it to /v1/files", "input_file_id", "file_not_found")
    now = int(time.time())
    batch = StoredBatch(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + 24 * 3600,
        metadata=body.metadata,
    )
    try:
        await _service(request).begin(batch, owner)
    except OSError as error:
        raise cannot_keep(error) from error
    return json_response(batch, headers)


@router.get("/v1/batches", **endpoint("List batches", None, BatchList, errors=(400, 401)))
async def list_batches(request: Request, limit: str | None = None, after: str | None = None) -> Response:
    """List batches, the newest first."""
    store = await _store(request)
    page = store.batches.page(request.state.owner, _limit(limit, _BATCHES_PER_PAGE), after)
    return json_response(BatchList(**_page(page, after)))


@router.get("/v1/batches/{batch_id}", **endpoint("Describe a batch", None, StoredBatch, errors=(401, 404)))
async def get_batch(request: Request, batch_id: str) -> Response:
    """Describe a batch."""
    return json_response((await _store(request)).batch(batch_id, request.state.owner))


@router.post("/v1/batches/{batch_id}/cancel", **endpoint("Cancel a batch", None, StoredBatch, errors=(401, 404)))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch; the answers so far become its output files."""
    try:
        return json_response(await _service(request).cancel(batch_id, request.state.owner))
    except OSError as error:
        raise cannot_keep(error) from error


class _ContentResponse(Response):
    """The content of a file, read in parts in another thread; the file may be deleted meanwhile."""

    def __init__(self, stored: StoredContent) -> None:
        super().__init__(media_type="application/octet-stream", headers={"content-length": str(stored.file.bytes)})
        self._stored = stored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stored as stored:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            left = stored.file.bytes
            while left:
                part = await in_thread(partial(stored.content.read, min(left, _PART_BYTES)))
                if not part:
                    raise OSError("the file was truncated while it was read")
                left -= len(part)
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _service(request: Request) -> BatchService:
    service = state_of(request).batches
    if service is None:
        raise ApiError(404, "files and batches are disabled: the server was started with --no-batch-api")
    return service


async def _store(request: Request) -> BatchStore:
    return await _service(request).open()


def _read_form(path: Path, boundary: bytes, size: int) -> tuple[int, int, str]:
    """Return offset, size and name of the file in a form on disk; `ApiError` (400) for an invalid form."""
    if not size:
        raise invalid("the form is empty", "file", "invalid_form")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body:
        fields = read_form(body, boundary)
        purpose = fields.get("purpose") or FormField(0, 0, None)
        purpose_text = body[purpose.begin : min(purpose.end, purpose.begin + 64)].decode("utf-8", "replace")
        if purpose_text != "batch":
            raise invalid(f"purpose is {purpose_text!r}; expected 'batch'", "purpose", "invalid_value")
        content = fields.get("file")
        if content is None or content.filename is None:
            raise invalid("file is required, with a filename", "file", "missing_required_parameter")
        return content.begin, content.end - content.begin, content.filename


def _limit(limit: str | None, most: int) -> int:
    """Return how many objects a page has: the `limit` of the query, and `most` at most. Raises `ApiError` (400)."""
    asked = 100 if limit is None else length_of(limit) or 0
    if not 1 <= asked <= 10_000:
        raise invalid(f"limit is {str(limit)[:20]!r}; expected 1 to 10000", "limit", "invalid_value")
    return min(asked, most)


def _page(found: tuple[list[Any], bool] | None, after: str | None) -> dict[str, Any]:
    if found is None:
        raise invalid(f"after is {(after or '')[:64]!r}, which does not exist", "after", "invalid_value")
    data, more = found
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return {"data": data, "has_more": more, "first_id": first, "last_id": last}


class FormField(NamedTuple):
    """One field: its content is `body[begin:end]`."""

    begin: int
    end: int
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary between the fields of a form, None for other bodies; `ApiError` (400) if it is invalid."""
    kind, given = parameters(content_type)
    if kind != "multipart/form-data" or "boundary" not in given:
        return None
    if not _BOUNDARY.fullmatch(given["boundary"]):
        raise invalid("the multipart boundary must have 1 to 70 ASCII characters (RFC 2046)", None, "invalid_form")
    return given["boundary"].encode()


def read_form(body: bytes | mmap.mmap, boundary: bytes) -> dict[str, FormField]:
    """Return the offsets of a form's fields, by name; nothing is copied. Raises `ApiError` (400) if it is malformed."""
    line = b"--" + boundary
    fields: dict[str, FormField] = {}
    at = _find(body, line, 0)
    while at >= 0:
        at += len(line)
        if body[at : at + 2] == b"--":
            return fields
        head_end = body.find(b"\r\n\r\n", at, at + 8192)
        if body[at : at + 2] != b"\r\n" or head_end < 0 or len(fields) == 32:
            break
        end = _find(body, b"\r\n" + line, head_end)
        if end < 0:
            break
        name, filename = _names(body[at + 2 : head_end])
        if name is not None:
            fields[name] = FormField(min(head_end + 4, end), end, filename)
        at = end + 2
    raise invalid("the form is malformed or truncated", None, "invalid_form")


def _find(body: bytes | mmap.mmap, wanted: bytes, begin: int) -> int:
    """Find bytes in slices, in linear time (`mmap.find` is not), so that each slice holds the GIL only briefly."""
    for at in range(begin, len(body), _SLICE):
        found = body[at : at + _SLICE + len(wanted) - 1].find(wanted)
        if found >= 0:
            return at + found
    return -1


def _names(head: bytes) -> tuple[str | None, str | None]:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        title, _, value = line.partition(":")
        if title.strip().lower() == "content-disposition":
            given = parameters(value)[1]
            charset, _, coded = given.get("filename*", "").partition("'")
            if charset.lower() == "utf-8":  # RFC 8187; the other charsets are no longer sent
                given["filename"] = unquote(coded.partition("'")[2], errors="replace")
            return given.get("name"), given.get("filename")
    return None, None
