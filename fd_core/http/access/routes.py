"""Every route of a server and of a router, with the right that it needs. A path without an entry is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["ROUTES", "Right", "Route", "find_route"]

Right = Literal["probe", "page", "key", "admin", "secret"]
"""`probe`: no key. `page`: no key unless pages are protected. `key`: any accepted key. `admin`: an admin key. `secret`:
the handler checks a secret of its own."""


@dataclass(frozen=True)
class Route:
    """What one path accepts."""

    right: Right
    methods: tuple[str, ...] = ("POST",)
    forwarded: bool = False
    """Whether a router passes the request on to one worker."""

    allowed: tuple[str, ...] = field(init=False)
    """Methods of the `Allow` header."""

    def __post_init__(self) -> None:
        allowed = {*self.methods, "OPTIONS", *(("HEAD",) if "GET" in self.methods else ())}
        object.__setattr__(self, "allowed", tuple(sorted(allowed)))


_GET: Final = ("GET",)
_PAGE: Final = Route("page", _GET)
_PROBE: Final = Route("probe", _GET)
_WORK: Final = Route("key", forwarded=True)
_BOTH: Final = ("GET", "POST")

ROUTES: Final[dict[str, Route]] = {
    "/": _PAGE,
    "/status": _PAGE,
    "/status.json": _PAGE,
    "/openapi.json": _PAGE,
    "/load": _PAGE,
    "/version": _PAGE,
    "/metrics": _PAGE,
    "/health": _PROBE,
    "/ready": _PROBE,
    "/ping": Route("probe", _BOTH),
    "/kv_events": Route("secret", _GET),
    "/v1/chat/completions": _WORK,
    "/v1/completions": _WORK,
    "/v1/messages": _WORK,
    "/v1/messages/count_tokens": _WORK,
    "/v1/responses": _WORK,
    "/v1/responses/{response_id}": Route("key", ("DELETE", "GET"), forwarded=True),
    "/v1/embeddings": _WORK,
    "/v1/score": _WORK,
    "/score": _WORK,
    "/v1/rerank": _WORK,
    "/rerank": _WORK,
    "/v2/rerank": _WORK,
    "/tokenize": _WORK,
    "/detokenize": _WORK,
    "/tokenizer_info": Route("key", _GET, forwarded=True),
    "/get_model_info": Route("key", _GET, forwarded=True),
    "/v1/models": Route("key", _GET),
    "/v1/models/{model:path}": Route("key", _GET),
    "/v1/abort_requests": Route("key"),
    "/v1/load_lora_adapter": Route("admin"),
    "/v1/unload_lora_adapter": Route("admin"),
    "/v1/files": Route("key", _BOTH),
    "/v1/files/{file_id}": Route("key", ("DELETE", "GET")),
    "/v1/files/{file_id}/content": Route("key", _GET),
    "/v1/batches": Route("key", _BOTH),
    "/v1/batches/{batch_id}": Route("key", _GET),
    "/v1/batches/{batch_id}/cancel": Route("key"),
}
"""Routes by their templates, which are written as FastAPI writes them."""


def find_route(path: str) -> tuple[str, Route] | None:
    """Return the template and the entry of a decoded path; None if the table has none."""
    route = None if "{" in path else ROUTES.get(path)
    if route is not None:
        return path, route
    return next(((each, ROUTES[each]) for each, pattern in _PATTERNS if pattern.fullmatch(path)), None)


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+(?::path)?\})", template)
    texts = [".*" if part.endswith(":path}") else "[^/]+" if part[:1] == "{" else re.escape(part) for part in parts]
    return re.compile("".join(texts), re.DOTALL)


_PATTERNS: Final = [(each, _pattern(each)) for each in ROUTES if "{" in each]
