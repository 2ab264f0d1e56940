"""The OpenAPI document, made from the same types that decode requests and encode answers, and JSON responses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

import fd_core
from fd_core.http.errors import ErrorAnswer

_REF: Final = "#/components/schemas/{name}"
_KIND: Final = "application/json"
_schemas: set[type[msgspec.Struct]] = {ErrorAnswer}

_ERRORS: Final = {
    400: "The request is malformed, out of range or not supported; `param` names the field",
    401: "The API key is missing or invalid",
    403: "Requests from pages of this origin are not allowed, see --allowed-origins",
    404: "The model does not exist",
    413: "The body is too large",
    415: "The body is compressed or not JSON",
    421: "The Host of the request is not allowed, see --allowed-hosts",
    429: "The API key exceeded its rate limit or quota; retry after the seconds in `Retry-After`",
    500: "The server or the engine failed",
    503: "The queue or the memory for bodies is full, the server is shutting down, or the engine is not running",
}

_EVENT: Final = {
    "type": "object",
    "description": "One event of the stream",
    "required": ["data"],
    "properties": {
        "event": {"type": "string", "description": "`error` for the event that ends a failed stream"},
        "data": {"type": "string", "description": "A chunk as JSON, `[DONE]` at the end, or an error as JSON"},
    },
}


class DirectRoute(APIRoute):
    """A route that passes the request to an endpoint without other parameters: no dependencies are resolved, and
    the `Gate` handles its exceptions."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if [*inspect.signature(endpoint).parameters] == ["request"]:

            async def answer(scope: Scope, receive: Receive, send: Send) -> None:
                response = await endpoint(Request(scope, receive, send))
                await response(scope, receive, send)

            self.app = answer


def endpoint(
    summary: str,
    body: type[msgspec.Struct] | None,
    answer: type[msgspec.Struct],
    *,
    stream: bool = False,
    lines: bool = False,
    errors: tuple[int, ...] | None = None,
    error: type[msgspec.Struct] = ErrorAnswer,
    unhealthy: bool = False,
    example: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a route's decorator that describe an endpoint, with the errors of reading a `body`.

    `stream` is True if the answer may be a stream of events, `lines` if it may be lines of JSON, each an `answer`.
    `error` is the body of error responses. `example` is a body that works as it is; the document fills in the `model`.
    """
    listed = errors if errors is not None else tuple(_ERRORS) if body is not None else (401,)
    limited = {429} if 401 in listed else set()
    listed = tuple(sorted({*listed, *limited, 403, 421}))
    responses = {status: _response(_ERRORS[status], error) for status in listed}
    responses[200] = _response("Success", answer)
    if stream:
        responses[200]["content"]["text/event-stream"] = {"schema": _EVENT}
    if lines:
        responses[200]["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
    if unhealthy:
        responses[503] = _response("Not available; `reason` gives the cause", answer)
    described: dict[str, Any] = {
        "summary": summary,
        "responses": responses,
        "response_model": None,
        "response_class": Response,
    }
    if body is not None:
        _schemas.add(body)
        content = {_KIND: {"schema": _reference(body), **({} if example is None else {"example": example})}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return described


def json_response(answer: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """Return a value as a JSON response."""
    return Response(msgspec.json.encode(answer), status, headers, media_type=_KIND)


def install(app: FastAPI, keys_required: bool) -> None:
    """Make `app` serve the document with the schemas of requests and answers."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=fd_core.__version__, routes=app.routes)
            ordered = sorted(_schemas, key=lambda schema: schema.__name__)
            _, components = msgspec.json.schema_components(ordered, ref_template=_REF)
            made["components"] = {"schemas": components}
            _fill_in(made["paths"], next(iter(app.state.fd.names)))
            if keys_required:
                made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                made["security"] = [{"key": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI documents this as the way to extend it


def _fill_in(paths: dict[str, dict[str, Any]], model: str) -> None:
    """Set the model of the examples that name one."""
    for operation in (each for path in paths.values() for each in path.values() if "requestBody" in each):
        content = operation["requestBody"]["content"].get(_KIND, {})
        if "model" in content.get("example", ()):
            described = {**content, "example": {**content["example"], "model": model}}
            operation["requestBody"] = {**operation["requestBody"], "content": {_KIND: described}}


def _response(text: str, answer: type[msgspec.Struct]) -> dict[str, Any]:
    _schemas.add(answer)
    return {"description": text, "content": {_KIND: {"schema": _reference(answer)}}}


def _reference(schema: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=schema.__name__)}
