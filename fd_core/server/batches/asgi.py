"""Asking the application from within its own process, as a client would, and without a socket."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from starlette.types import ASGIApp, Message, Scope

OWNER: Final = "fd_core.owner"
"""Key of a scope whose request the server makes itself, for the owner it names; no client can set one."""


class AsgiAnswer(NamedTuple):
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes


async def ask(app: ASGIApp, path: str, body: bytes, request_id: str, owner: str) -> AsgiAnswer:
    """Return the answer to a POST with a JSON body, which counts as sent by `owner`."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "client": None,
        "server": None,
        OWNER: owner,
    }
    parts: list[bytes] = []
    started: Message = {}
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # who asks here stays until the answer is there
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in started["headers"]}
    return AsgiAnswer(started["status"], headers, b"".join(parts))
