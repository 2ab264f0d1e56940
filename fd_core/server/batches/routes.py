"""/v1/files and /v1/batches, as OpenAI's. Each key sees the files and batches that were made with it."""

from __future__ import annotations

import asyncio
import mmap
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from msgspec import Meta

from fd_core.server.batches.form import boundary_of, read_form
from fd_core.server.batches.lines import ENDPOINTS
from fd_core.server.batches.service import BatchService
from fd_core.server.batches.store import BatchStore, StoredBatch, StoredFile, cannot_keep
from fd_core.server.body import BodyFormat, receive
from fd_core.server.doors.bodies import BodyBudget
from fd_core.server.doors.headers import length_of
from fd_core.server.errors import ApiError, invalid
from fd_core.server.openapi import endpoint
from fd_core.server.state import state_of

__all__ = ["router"]

router = APIRouter()

_FORM_BYTES: Final = 16 * 1024
"""What a form has beside the file, at most."""
_WINDOW_SECONDS: Final = 24 * 3600
_MOST_LISTED: Final = 100


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
    """A file that is gone."""

    id: str
    object: str = "file"
    deleted: bool = True


_BODY: Final = BodyFormat(BatchRequest)


@router.post("/v1/files", include_in_schema=False)
async def upload(request: Request) -> Response:
    """Keep the file of a form with the fields `purpose` and `file`."""
    store = _service(request).store
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise ApiError(415, "the file must be sent as multipart/form-data", code="unsupported_media_type")
    announced = length_of(request.headers.get("content-length")) or 0
    store.require_room(max(0, announced - _FORM_BYTES))
    path = store.folder / f"{secrets.token_hex(12)}.upload"
    try:
        with path.open("xb") as file:
            most = store.limit - store.used + _FORM_BYTES
            with BodyBudget(most).share(request.headers.get("content-length"), most) as share:  # on disk, not in memory
                async for part in receive(request, share):
                    file.write(part)
        found = await asyncio.to_thread(_keep, store, path, boundary, request.state.owner)
    except OSError as error:
        raise cannot_keep(error) from error
    finally:
        path.unlink(missing_ok=True)
    return _json(found)


@router.get("/v1/files", **endpoint("List files", None, FileList, errors=(400, 401)))
async def list_files(
    request: Request, purpose: str | None = None, limit: str | None = None, after: str | None = None
) -> Response:
    """List files, the newest first."""
    files = _service(request).store.files_of(request.state.owner)
    shown = [each for each in files if purpose in (None, each.purpose)]
    page, more = _page(shown, limit, after)
    return _json(FileList(data=page, has_more=more, first_id=_id(page, 0), last_id=_id(page, -1)))


@router.get("/v1/files/{file_id}", **endpoint("Describe a file", None, StoredFile, errors=(401, 404)))
async def get_file(request: Request, file_id: str) -> Response:
    """Describe a file."""
    return _json(_service(request).store.file(file_id, request.state.owner))


@router.get("/v1/files/{file_id}/content", include_in_schema=False)
async def get_content(request: Request, file_id: str) -> Response:
    """Return what a file holds."""
    store = _service(request).store
    store.file(file_id, request.state.owner)
    return FileResponse(store.content(file_id), media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", **endpoint("Delete a file", None, DeletedFile, errors=(400, 401, 404)))
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file that no batch needs."""
    _service(request).store.delete(file_id, request.state.owner)
    return _json(DeletedFile(file_id))


@router.post("/v1/batches", **endpoint("Run the requests of a file", BatchRequest, StoredBatch))
async def create_batch(request: Request) -> Response:
    """Begin to answer the requests of a file."""
    service = _service(request)
    body, headers = await _BODY.read(request, state_of(request).config.max_body_bytes)
    if body.endpoint not in ENDPOINTS:
        raise invalid(f"endpoint is {body.endpoint[:80]!r}; give {', '.join(ENDPOINTS)}", "endpoint", "invalid_value")
    if len(msgspec.json.encode(body.metadata)) > _FORM_BYTES:
        raise invalid(f"metadata has more than {_FORM_BYTES:,} bytes", "metadata")
    if not service.store.has(body.input_file_id, request.state.owner):
        message = f"there is no file {body.input_file_id[:64]!r}; upload it to /v1/files"
        raise invalid(message, "input_file_id", "file_not_found")
    now = int(time.time())
    batch = StoredBatch(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + _WINDOW_SECONDS,
        metadata=body.metadata,
    )
    service.begin(batch, request.state.owner)
    return Response(msgspec.json.encode(batch), headers=headers, media_type="application/json")


@router.get("/v1/batches", **endpoint("List batches", None, BatchList, errors=(400, 401)))
async def list_batches(request: Request, limit: str | None = None, after: str | None = None) -> Response:
    """List batches, the newest first."""
    page, more = _page(_service(request).store.batches_of(request.state.owner), limit, after)
    return _json(BatchList(data=page, has_more=more, first_id=_id(page, 0), last_id=_id(page, -1)))


@router.get("/v1/batches/{batch_id}", **endpoint("Describe a batch", None, StoredBatch, errors=(401, 404)))
async def get_batch(request: Request, batch_id: str) -> Response:
    """Describe a batch."""
    return _json(_service(request).store.batch(batch_id, request.state.owner))


@router.post("/v1/batches/{batch_id}/cancel", **endpoint("Cancel a batch", None, StoredBatch, errors=(401, 404)))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Let no further request of a batch begin; what was answered becomes its files."""
    return _json(_service(request).cancel(batch_id, request.state.owner))


def _service(request: Request) -> BatchService:
    service = state_of(request).batches
    if service is None:
        raise ApiError(404, "this server keeps no files and batches: it was started with --no-batch-api")
    return service


def _keep(store: BatchStore, path: Any, boundary: bytes, owner: str) -> StoredFile:
    """Take the file out of a form that lies on disk."""
    if not path.stat().st_size:
        raise invalid("the form is empty", "file", "invalid_form")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body:
        fields = read_form(body, boundary)
        purpose = fields.get("purpose")
        said = (
            ""
            if purpose is None
            else body[purpose.begin : min(purpose.end, purpose.begin + 64)].decode("utf-8", "replace")
        )
        if said != "batch":
            raise invalid(f"purpose is {said!r}; files are kept for 'batch' only", "purpose", "invalid_value")
        content = fields.get("file")
        if content is None or content.filename is None:
            raise invalid("file is required, with a name", "file", "missing_required_parameter")
        return store.add(file, content.begin, content.end - content.begin, content.filename, said, owner)


def _page(found: Sequence[Any], limit: str | None, after: str | None) -> tuple[list[Any], bool]:
    """Return up to `limit` objects behind the one with the id `after`, the newest first, and whether there are more."""
    most = _MOST_LISTED if limit is None else length_of(limit) or 0
    if not 1 <= most <= 10_000:
        raise invalid(f"limit is {str(limit)[:20]!r}; give 1 to 10000", "limit", "invalid_value")
    ordered = list(reversed(found))
    if after is not None:
        ids = [each.id for each in ordered]
        if after not in ids:
            raise invalid(f"after is {after[:64]!r}, which does not exist", "after", "invalid_value")
        ordered = ordered[ids.index(after) + 1 :]
    return ordered[:most], len(ordered) > most


def _id(page: list[Any], index: int) -> str | None:
    return page[index].id if page else None


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
