"""/v1/files and /v1/batches, compatible with OpenAI's. Each key sees only its own files and batches."""

from __future__ import annotations

import logging
import secrets
import time
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fd_core.http.errors import ApiError, invalid, unsupported
from fd_core.http.headers import length_of, refuse_encoding
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.batches.lines import ENDPOINTS
from fd_core.server.batches.running import in_thread
from fd_core.server.batches.service import BatchService
from fd_core.server.batches.store import BatchStore, StoredBatch, StoredContent, StoredFile, Upload, cannot_keep
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.schemas.unsupported import Refusal
from fd_core.server.state import state_of

router = APIRouter(route_class=DirectRoute)

_METADATA_BYTES: Final = 16 * 1024
_FILES_PER_PAGE: Final = 1000
_BATCHES_PER_PAGE: Final = 100
"""A page may be smaller than its `limit`: encoding it must not delay other streams."""
_PART_BYTES: Final = 1 << 18
_MOST_FIELDS: Final = 32
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # any client can cause its warnings


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": list(ENDPOINTS)})]
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, Any] | None = None


class FileList(msgspec.Struct, kw_only=True):
    """Files, the newest first unless the request has another order."""

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


_NO_EXPIRY: Final = "files do not expire; delete them at /v1/files/ID"
_BODY: Final = BodyFormat(BatchRequest, {"output_expires_after": Refusal(_NO_EXPIRY)})
_EXAMPLE: Final = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


@router.post("/v1/files", include_in_schema=False)
async def upload(request: Request) -> Response:
    """Store the file of a form with the fields `purpose` and `file`."""
    store, owner = await _store(request), request.state.owner
    refuse_encoding(request.headers.getlist("content-encoding"))
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(415, "the file must be sent as multipart/form-data", code="unsupported_media_type")
    store.bytes.require(owner, length_of(request.headers.get("content-length")) or 0)
    try:
        with store.upload(owner) as upload:
            form = UploadForm(options[b"boundary"], upload)
            async for part in request.stream():
                upload.reserve(len(part))
                await in_thread(partial(form.write, part))
            found = upload.keep(form.filename_of_batch(), "batch")
    except FormParserError:
        raise invalid("the form is malformed or truncated", None, "invalid_form") from None
    except ClientDisconnect:
        raise invalid("the client disconnected before the body was complete", None, "invalid_body") from None
    except OSError as error:
        raise cannot_keep(error) from error
    return json_response(found)


@router.get("/v1/files", **endpoint("List files", None, FileList, errors=(400, 401)))
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: str | None = None,
    after: str | None = None,
    order: str | None = None,
) -> Response:
    """List files, the newest first, or with `order=asc` the oldest."""
    store, most = await _store(request), _limit(limit, _FILES_PER_PAGE)
    if order not in (None, "asc", "desc"):
        raise invalid(f"order is {order[:20]!r}; expected asc or desc", "order", "invalid_value")
    page = store.files.page(request.state.owner, most, after, kind=purpose, oldest_first=order == "asc")
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


class UploadForm:
    """Parses a form as it arrives, and writes the content of its field `file` to an upload."""

    def __init__(self, boundary: bytes, upload: Upload) -> None:
        """Raises `FormParserError` for a boundary that is too long."""
        self._upload = upload
        self._title = self._value = self._name = self._purpose = b""
        self._filename: bytes | None = None
        self._fields = 0
        self._complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_field,
                "on_header_field": self._add_title,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_part_data": self._add_data,
                "on_end": self._end,
            },
        )

    def write(self, part: bytes) -> None:
        """Parse bytes that were reserved; may run in another thread. Raises `FormParserError`, `OSError`."""
        self._parser.write(part)

    def filename_of_batch(self) -> str:
        """Return the name of the file. Raises `FormParserError` if the form is incomplete, `ApiError` if a field is."""
        if not self._complete:
            raise FormParserError
        if self._purpose != b"batch":
            shown = self._purpose.decode("utf-8", "replace")
            raise invalid(f"purpose is {shown!r}; expected 'batch'", "purpose", "invalid_value")
        if self._filename is None:
            raise invalid("file is required, with a filename", "file", "missing_required_parameter")
        return self._filename.decode("utf-8", "replace")

    def _begin_field(self) -> None:
        self._name, self._fields = b"", self._fields + 1
        if self._fields > _MOST_FIELDS:
            raise FormParserError

    def _add_title(self, data: bytes, begin: int, end: int) -> None:
        self._title += data[begin:end]

    def _add_value(self, data: bytes, begin: int, end: int) -> None:
        self._value += data[begin:end]

    def _end_header(self) -> None:
        if self._title.lower() == b"content-disposition":
            _, options = parse_options_header(self._value.decode("latin-1"))
            self._name, filename = options.get(b"name", b""), options.get(b"filename")
            if self._name == b"file" and filename is not None:
                if self._filename is not None:
                    raise FormParserError
                self._filename = filename
                self._upload.write(b"")  # an empty file is a file
        self._title = self._value = b""

    def _add_data(self, data: bytes, begin: int, end: int) -> None:
        if self._name == b"file" and self._filename is not None:
            self._upload.write(data[begin:end])
        elif self._name.startswith(b"expires_after"):
            raise unsupported(f"expires_after is not supported: {_NO_EXPIRY}", "expires_after")
        elif self._name == b"purpose":
            self._purpose = (self._purpose + data[begin:end])[:64]

    def _end(self) -> None:
        self._complete = True


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
