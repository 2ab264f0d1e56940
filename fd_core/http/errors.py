"""Errors in OpenAI's format, and the only conversion of exceptions to HTTP responses."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
from starlette.exceptions import HTTPException

from fd_core.errors import BadRequest, EngineDead, FdError

log = logging.getLogger(__name__)

T = TypeVar("T")
MESSAGES_PATH: Final = "/v1/messages"
"""Path prefix below which errors have Anthropic's format."""
OLLAMA_PATH: Final = "/api/"
"""Path prefix below which errors have Ollama's format."""
_MESSAGES_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
}


class ErrorDetail(msgspec.Struct):
    """Error message, the field at fault, and a code for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    """Body of every error response."""

    error: ErrorDetail


class HealthAnswer(msgspec.Struct):
    """`ok`, or the error."""

    status: str
    reason: str | None = None
    """Alongside `ok`: which of several engines is missing, and which background tasks fail."""


class VersionAnswer(msgspec.Struct):
    """The version of fd_core."""

    version: str


_STATUS_TEXT = {405: "this path does not support this method"}


class ApiError(Exception):
    """Error response for a client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """Return the JSON that OpenAI's clients parse."""
        detail = ErrorDetail(message=self.message, type=self.kind, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorAnswer(error=detail))

    def body_at(self, path: str) -> bytes:
        """Return the JSON that clients of the API at `path` parse."""
        if path.startswith(MESSAGES_PATH):
            return self.messages_body()
        return self.ollama_body() if path.startswith(OLLAMA_PATH) else self.body()

    def ollama_body(self) -> bytes:
        """Return the JSON that Ollama's clients parse."""
        return msgspec.json.encode({"error": self.message})

    def messages_body(self) -> bytes:
        """Return the JSON that Anthropic's clients parse."""
        kind = _MESSAGES_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """Return a 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def unsupported(message: str, param: str) -> ApiError:
    """Return a 400 for a field that requests an unsupported feature."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def required(value: T | None, field: str) -> T:
    """Return the value of a required field. Raises `ApiError` (400) if it is missing."""
    if value is None:
        raise invalid(f"{field} is required", field, "missing_required_parameter")
    return value


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    """Return a 503; `retry_after` is the time in seconds after which the client should retry."""
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": str(retry_after)})


def no_such_path(path: str) -> ApiError:
    """Return the 404 for an unknown path, with a hint for frequent mistakes."""
    message = f"unknown path {path[:128]!r}"
    if "//" in path:
        message += "; the path contains an empty part: remove the trailing slash of the client's base URL"
    elif path.startswith("/v1/v1/"):
        message += "; /v1 is duplicated: remove it from the client's base URL"
    elif path.rstrip("/") == "/v1":
        message += ", which is a base URL; use a path below it, such as /v1/chat/completions"
    elif path.startswith(OLLAMA_PATH):
        message += "; of Ollama's API, the server has chat, generate, embed, tags, ps, show and version"
    elif not path.startswith("/v1/"):
        message += "; paths of OpenAI's API start with /v1: add it to the client's base URL"
    return ApiError(404, message)


def to_api_error(error: Exception) -> ApiError:
    """Convert any exception; of an unexpected one only type and traceback are logged: its text may quote a prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequest):
        return invalid(str(error), error.field, error.code)
    if isinstance(error, EngineDead):
        return unavailable(str(error), "engine_dead", retry_after=5)
    if isinstance(error, FdError):
        return ApiError(500, str(error), kind="server_error", param=error.field)
    if isinstance(error, HTTPException):
        message = _STATUS_TEXT.get(error.status_code, error.detail)
        return ApiError(error.status_code, message, headers=error.headers)
    places = "".join(traceback.format_tb(error.__traceback__))
    log.error("unexpected %s while serving a request; traceback without text:\n%s", type(error).__qualname__, places)
    return ApiError(500, "internal server error; see the server's log", kind="server_error")
