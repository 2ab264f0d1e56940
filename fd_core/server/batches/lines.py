"""The lines of batch files in OpenAI's format, one request and one answer a line, and the file of a run's answers.

A run may be interrupted: the file of answers holds whole lines only, and is complete or not there at all.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from fd_core.errors import ConfigError

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Endpoints that the requests of a batch may call; the line gets a 404 if the server does not serve its endpoint."""
_LONGEST_ID: Final = 512


class LineError(msgspec.Struct):
    """Why a line has no answer."""

    code: str
    message: str


class BatchResponse(msgspec.Struct):
    """Response of the server to one line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, kw_only=True):
    """One line of the output."""

    id: str
    """Id of the input line, so that an interrupted run resumes where it stopped."""
    custom_id: str | None
    response: BatchResponse | None = None
    error: LineError | None = None

    @property
    def number(self) -> int:
        """Number of the input line."""
        return int(self.id.split("_")[2])

    @property
    def ok(self) -> bool:
        """True if the request succeeded."""
        return self.response is not None and self.response.status_code == 200


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Asked(msgspec.Struct):
    stream: Any = None


class BatchLine(NamedTuple):
    """One line of the input; either `error` is set, or it can be sent."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: LineError | None = None
    digest: str = ""
    """Hex BLAKE2 of the line, so that an interrupted run does not resume with other requests."""

    @property
    def id(self) -> str:
        """The id of the line's answer."""
        return f"batch_req_{self.number:08d}" + f"_{self.digest}" * bool(self.digest)


_line: Final = msgspec.json.Decoder(_Line)
_asked: Final = msgspec.json.Decoder(_Asked)


def read_requests(file: IO[bytes], longest: int, endpoint: str | None = None) -> Iterator[BatchLine]:
    """Yield the requests of a file, which have to go to `endpoint`; a line that cannot be sent has its error set."""
    number, seen = 0, dict[str, int]()
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                pass
            yield _wrong(number, None, "line_too_long", message=f"the line exceeds {longest:,} bytes")
        elif line.strip():
            # Editors on Windows write a byte order mark, which is no JSON.
            line = line.strip()
            request = _read(number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, endpoint)
            first = number if request.custom_id is None else seen.setdefault(request.custom_id, number)
            if first != number:
                message = f"custom_id is already used by line {first}; it must be unique"
                request = _wrong(number, request.custom_id, "duplicate_custom_id", message=message)
            yield request._replace(digest=hashlib.blake2b(line, digest_size=8).hexdigest())


def answered(request: BatchLine, status: int, request_id: str, body: bytes) -> BatchAnswer:
    """Return the output line for a response of the server."""
    return BatchAnswer(
        id=request.id, custom_id=request.custom_id, response=BatchResponse(status, request_id, msgspec.Raw(body))
    )


def failed(request: BatchLine, error: LineError) -> BatchAnswer:
    """Return the line for a request that was not sent, or got no answer."""
    return BatchAnswer(id=request.id, custom_id=request.custom_id, error=error)


def as_line(answer: BatchAnswer) -> bytes:
    """Return the bytes of a line, its end included; it contains no character at which readers split lines."""
    text = msgspec.json.encode(answer)
    for letter in "\u0085\u2028\u2029":
        text = text.replace(letter.encode(), rb"\u%04x" % ord(letter))
    return text + b"\n"


def _read(number: int, line: bytes, endpoint: str | None) -> BatchLine:
    try:
        found = _line.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error).removeprefix("JSON is malformed: ") or "nested too deeply"
        return _wrong(number, None, "invalid_line", message=f"invalid request: {reason[:1].lower()}{reason[1:]}")
    custom_id, wanted = found.custom_id[:_LONGEST_ID], (endpoint,) if endpoint is not None else ENDPOINTS
    if len(found.custom_id) > _LONGEST_ID or not found.custom_id:
        message = f"custom_id has {len(found.custom_id)} characters; expected 1 to {_LONGEST_ID}"
        return _wrong(number, custom_id or None, "invalid_custom_id", message=message)
    if found.method != "POST":
        return _wrong(number, custom_id, "invalid_method", message=f"method is {found.method[:20]!r}; expected POST")
    if found.url not in wanted:
        return _wrong(number, custom_id, "invalid_url", f"url is {found.url[:80]!r}; expected {' or '.join(wanted)}")
    body = bytes(found.body)
    try:
        streams = bool(_asked.decode(body).stream)
    except (msgspec.DecodeError, RecursionError):
        return _wrong(number, custom_id, "invalid_body", message="body must be an object")
    if streams:
        return _wrong(number, custom_id, "invalid_body", message="body.stream is true; batches do not support streams")
    return BatchLine(number, custom_id, found.url, body=body)


def _wrong(number: int, custom_id: str | None, code: str, message: str) -> BatchLine:
    return BatchLine(number, custom_id, error=LineError(code, f"line {number}: {message}"))


_decoder: Final = msgspec.json.Decoder(BatchAnswer)


class AnswerFile(AbstractContextManager["AnswerFile"]):
    """Answers go to `PATH.partial`, which becomes `PATH` at the end; a later run finds those before it in `known`."""

    def __init__(self, path: Path, account: Callable[[int], None] = lambda _: None) -> None:
        """`account` receives growth in bytes and may raise. Raises `ConfigError` for a file that is not the output of a
        run.
        """
        self.path = path
        self.known: dict[int, BatchAnswer] = {}
        """Answers by the number of their line, without their bodies."""
        self._account = account
        self._partial = path.with_name(f"{path.name}.partial")
        self._require_new()
        try:
            self._file = self._partial.open("a+b", buffering=0)
            self._lock()
            self._file.seek(0)
            end = 0
            for line in self._file:
                if not line.endswith(b"\n"):
                    break
                found = _decoder.decode(line)
                if found.response is not None:
                    found.response.body = msgspec.Raw(b"null")
                self.known[found.number] = found
                end += len(line)
            self._file.truncate(end)
            self.size = end
        except OSError as error:
            raise ConfigError(f"cannot write {self._partial}: {error.strerror}", field="--output") from error
        except (msgspec.DecodeError, IndexError, ValueError) as error:
            raise ConfigError(
                f"{self._partial} is not the output of an interrupted run", field="--output", hint="delete it"
            ) from error

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _require_new(self) -> None:
        if self.path.exists():
            raise ConfigError(f"{self.path} exists already", field="--output", hint="choose another file, or delete it")

    def _lock(self) -> None:
        """Lock the file until it is closed: two runs would each write all answers."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            message = f"another run writes {self._partial}"
            raise ConfigError(message, field="--output", hint="wait for its end, or choose another file") from None
        except OSError:  # such as a file system without locks
            return
        self._require_new()  # the other run may just have ended

    def write(self, answer: BatchAnswer) -> None:
        """Append an answer. Raises `OSError` if it could not be written completely, and truncates the partial line."""
        line = as_line(answer)
        self._account(len(line))
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # else the line is cut off when the file is opened again, or complete
                self._file.truncate(self.size)
                self._account(-len(line))
            raise
        self.size += len(line)

    def sync(self) -> None:
        """Flush the file to disk."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Make the file complete: it appears under its own name."""
        self.sync()
        self._partial.replace(self.path)  # before the lock ends
        self._file.close()


def truncate_partial_line(file: IO[bytes]) -> int:
    """Truncate after the last whole line, since a process that died or a disk that failed may leave a partial one."""
    end = file.seek(0, os.SEEK_END)
    begin = end
    while begin:
        before, begin = begin, max(0, begin - (1 << 16))
        file.seek(begin)
        if (found := file.read(before - begin).rfind(b"\n")) >= 0:
            begin += found + 1
            break
    if begin < end:
        file.truncate(begin)
    return begin
