"""Errors as answers of the application, in the shape of the API that was asked."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from fd_core.errors import FdError
from fd_core.http.errors import ApiError, no_such_path, to_api_error


def error_response(error: ApiError, path: str = "") -> Response:
    """Return the HTTP answer for an error, in the shape of the API that is served at `path`."""
    return Response(error.body_at(path), error.status, error.headers, media_type="application/json")


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:  # from routing: no handler of a path raises it
        error = no_such_path(request.url.path)
    return error_response(to_api_error(error), request.url.path)


def install_handlers(app: FastAPI) -> None:
    """Answer every error that is meant for the client in OpenAI's shape."""
    for kind in (ApiError, FdError, HTTPException):
        app.add_exception_handler(kind, _handle)
