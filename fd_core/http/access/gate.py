"""What the gates of server and router do alike, whatever library reads HTTP."""

from __future__ import annotations

import re
import uuid
from typing import Final

from fd_core.http.access.routes import find_route
from fd_core.http.errors import no_such_path

__all__ = ["allow_header", "request_id_of"]

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")


def request_id_of(given: bytes) -> bytes:
    """Return the client's X-Request-Id if it is usable, else a fresh one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def allow_header(path: str) -> dict[str, str]:
    """Return the header of the answer to OPTIONS, which needs no key. Raises `ApiError` (404) for an unknown path."""
    found = find_route(path)
    if found is None:
        raise no_such_path(path)
    return {"Allow": ", ".join(found[1].allowed)}
