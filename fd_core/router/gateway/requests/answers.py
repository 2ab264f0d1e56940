"""Answers of the gateway itself, in the shapes of the server's answers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from aiohttp import web

from fd_core.http.errors import ApiError, unavailable
from fd_core.router.selection import NoWorker

__all__ = ["error_event", "error_response", "json_response", "lost", "refusal"]


def json_response(value: Any, status: int = 200) -> web.Response:
    """Return a value as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(error: ApiError, path: str) -> web.Response:
    """Return an error as clients of the API at `path` expect it."""
    body = error.body_at(path)
    return web.Response(body=body, status=error.status, headers=error.headers, content_type="application/json")


def error_event(error: ApiError, path: str) -> bytes:
    """Return an error as the last event of a stream from `path`, which no `[DONE]` follows."""
    return b"event: error\ndata: " + error.body_at(path) + b"\n\n"


def refusal(answer: NoWorker) -> ApiError:
    """Return the error for a client whose request got no worker."""
    wait = answer.retry_after if answer.retry_after is not None else 1.0
    seconds = max(1, math.ceil(wait))
    if answer.status == 503:
        return unavailable(answer.message, answer.reason, retry_after=seconds)
    kind = "rate_limit_error" if answer.status == 429 else "server_error"
    headers = {"Retry-After": str(seconds)} if answer.status == 429 or answer.retry_after is not None else {}
    return ApiError(answer.status, answer.message, kind=kind, code=answer.reason, headers=headers)


def lost() -> ApiError:
    """Return the error for a client whose answer broke off: the client may repeat the request, the gateway must not."""
    message = "the worker was lost while it answered; the answer is not complete, repeat the request"
    return ApiError(502, message, kind="server_error", code="worker_lost")
