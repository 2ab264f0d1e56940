"""Access control: the keys of a server or a router, their limits, and the responses to rejected requests."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from fd_core.config import ListenConfig
from fd_core.errors import ConfigError
from fd_core.http.access.keys import (
    FLAG,
    ApiKey,
    KeyAccount,
    KeyLimits,
    KeyRing,
    LimitReached,
    read_key_file,
    scoped,
    warn_if_others_read,
)
from fd_core.http.access.record import RequestRecord
from fd_core.http.errors import ApiError, no_such_path

log = logging.getLogger(__name__)

_MOST_NAMES: Final = 256
"""Most keys with separate metrics; the rejections of all further keys are one sample."""
_WORDS: Final = {"requests": "requests a minute", "tokens": "tokens a minute", "parallel": "parallel requests"}
_NO_LIMITS: Final = KeyLimits()
_OPEN_TO_ALL: Final = ListenConfig()
_FIELDS: Final = {"requests": "requests_per_minute", "tokens": "tokens_per_minute", "parallel": "parallel_requests"}


class AccessControl:
    """The keys in force, and their usage; used from one event loop."""

    def __init__(self, config: ListenConfig = _OPEN_TO_ALL) -> None:
        """Read the keys from a server's or a router's settings. Raises `ConfigError` for an invalid file."""
        self._plain = config.api_keys
        self._file = None if config.api_key_file is None else Path(config.api_key_file)
        self.reloadable = self._file is not None
        self._open: tuple[Right, ...] = ("probe", "secret") if config.protect_pages else ("probe", "secret", "page")
        self._share_prefixes = config.share_prefix_cache
        self.ring = KeyRing(self._read())
        self.has_keys = len(self.ring) > 0
        self._accounts: dict[str, KeyAccount] = {}
        self.refusals: Counter[tuple[str, str]] = Counter()
        """Rejected requests, by name of the key and limit."""
        if self._file is not None:
            warn_if_others_read(self._file)

    def _read(self) -> tuple[ApiKey, ...]:
        named = () if self._file is None else read_key_file(self._file)
        return (*map(ApiKey.of, self._plain), *named)

    async def reload(self) -> None:
        """Reload the file. An invalid one is logged and changes nothing."""
        if self._file is None:
            return
        try:
            ring = await asyncio.to_thread(lambda: KeyRing(self._read()))
            warn_if_others_read(self._file)
        except (ConfigError, OSError) as error:
            log.error("API keys were not reloaded: %s", error)
            return
        self.ring, self.has_keys = ring, len(ring) > 0
        named = {key.name: key for key in ring if key.name}
        self._accounts = {name: each for name, each in self._accounts.items() if name in named or each.running}
        for name, account in self._accounts.items():
            if name in named:
                account.limits = named[name].limits
        log.info("reloaded %s: %d API keys", self._file, len(ring))

    def identify(self, method: str, path: str, authorization: bytes | None, api_key: bytes | None) -> ApiKey | None:
        """Return the key of a request, None without one. Raises `ApiError` (401) if an accepted key is required."""
        if not self.has_keys:
            return None
        found = find_route(path)
        right = None if found is None else found[1].right
        page = right == "page" and method in ("GET", "HEAD")
        key = self.ring.find(authorization, api_key, basic=page)
        if key is None and right not in self._open:
            scheme = 'Basic realm="API key as password"' if page else "Bearer"
            sent = "missing API key" if authorization is api_key is None else "invalid API key"
            message = f"{sent}; send a valid key in the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": scheme})
        return key

    def of_owner(self, owner: str) -> ApiKey | None:
        """Return the key of a batch, None if it was created without one; `ApiError` (401) if it is no longer valid."""
        if not self.has_keys or not owner:
            return None
        key = self.ring.of_owner(owner.partition(".")[0])
        if key is None:
            raise ApiError(401, "the API key that created this batch is no longer valid", code="invalid_api_key")
        return key

    @staticmethod
    def authorize(record: RequestRecord, method: str, path: str) -> str:
        """Return the route's template for a request with a known key; `ApiError`: 404, 405, 403 without the right."""
        found = find_route(path)
        if found is None:
            raise no_such_path(path)
        template, route = found
        if method not in route.allowed or method == "OPTIONS":
            headers = {"Allow": ", ".join(route.allowed)}
            raise ApiError(405, f"this path requires {', '.join(route.methods)}", headers=headers)
        if route.right == "admin" and not record.is_admin:
            what = f"{path} affects all keys and requires a key with `admin = true` in the file of {FLAG}"
            if record.tenant is not None and record.tenant.admin:
                what += "; on the worker, this applies to the key that the router sends"
            raise ApiError(403, what, kind="permission_error", code="admin_key_required")
        return template

    def salt(self, owner: str, given: str | None) -> str:
        """Return the salt of an owner's prompts in the prefix cache, so that timing reveals no prompts of others."""
        return given or "" if self._share_prefixes or not owner else scoped(owner, given)

    def enter(self, record: RequestRecord, method: str, path: str, now: float) -> None:
        """Admit a request; its record must be closed. Raises `ApiError` (429) if a limit of its key is reached."""
        key = record.key
        # Reads, and requests that end work, are never limited.
        ends = path in ("/v1/abort_requests", "/ping") or path.endswith("/cancel")
        if key is None or key.limits == _NO_LIMITS or method != "POST" or ends:
            return
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = KeyAccount(key.limits)
        try:
            account.enter(now)
            record.account = account
        except LimitReached as error:
            refusal = self.refused(key, error)
            refusal.headers |= limit_headers(account, now)
            raise refusal from None

    def refused(self, key: ApiKey, error: LimitReached) -> ApiError:
        """Count a rejection, and return its response in OpenAI's format."""
        known = len({name for name, _ in self.refusals}) < _MOST_NAMES or (key.name, error.limited) in self.refusals
        self.refusals[key.name if known else "other", error.limited] += 1
        message = (
            f"API key {key.name} exceeds its limit of {error.limit:,} {_WORDS[error.limited]} "
            f"({_FIELDS[error.limited]}): {error.used:,} used, this request needs {error.asked:,}"
        )
        headers = {}
        if error.wait is None:
            message += "; the request can never fit: reduce it, for example with a lower max_tokens"
            headers["x-should-retry"] = "false"
        else:
            seconds = max(1, math.ceil(error.wait))
            message += f"; retry in {seconds} s"
            headers["Retry-After"] = str(seconds)
        kind = "tokens" if error.limited == "tokens" else "requests"
        return ApiError(429, message, kind=kind, code="rate_limit_exceeded", headers=headers)

    def reserve(self, record: RequestRecord, tokens: int) -> None:
        """Reserve the tokens that a request may need. Raises `ApiError` (429)."""
        try:
            record.reserve(tokens)
        except LimitReached as error:
            if record.key is None:
                raise
            raise self.refused(record.key, error) from None


def allow_header(path: str) -> dict[str, str]:
    """Return the header of the response to OPTIONS, which needs no key. Raises `ApiError` (404) for an unknown path."""
    found = find_route(path)
    if found is None:
        raise no_such_path(path)
    return {"Allow": ", ".join(found[1].allowed)}


def limit_headers(account: KeyAccount | None, now: float) -> dict[str, str]:
    """Return OpenAI's headers with the remaining limits of this minute; none without an account."""
    headers: dict[str, str] = {}
    if account is None:
        return headers
    limits = account.limits
    for what, limit, window in (
        ("requests", limits.requests_per_minute, account.requests),
        ("tokens", limits.tokens_per_minute, account.tokens),
    ):
        if limit is not None:
            reset = window.reset(now)
            headers[f"x-ratelimit-limit-{what}"] = str(limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, limit - window.used))
            headers[f"x-ratelimit-reset-{what}"] = _duration(reset)
    return headers


def _duration(seconds: float) -> str:
    """Return a time as OpenAI writes it, such as `1m0.25s`."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.3g}s" if minutes else f"{rest:.3g}s"


Right = Literal["probe", "page", "key", "admin", "secret"]
"""`probe`: no key. `page`: no key unless pages are protected. `key`: any accepted key. `admin`: an admin key. `secret`:
the handler checks a separate secret."""


@dataclass(frozen=True)
class Route:
    """Methods and access right of one path."""

    right: Right
    methods: tuple[str, ...] = ("POST",)
    forwarded: bool = False
    """True if a router forwards the request to one worker."""

    allowed: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        allowed = {*self.methods, "OPTIONS", *(("HEAD",) if "GET" in self.methods else ())}
        object.__setattr__(self, "allowed", tuple(sorted(allowed)))


_GET: Final = ("GET",)
_PAGE: Final = Route("page", _GET)
_PROBE: Final = Route("probe", _GET)
_WORK: Final = Route("key", forwarded=True)
_BOTH: Final = ("GET", "POST")

ON_EVERY_WORKER: Final = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/v1/pause", "/pause", "/pause_generation", "/v1/resume", "/resume", "/continue_generation"),
    *("/v1/sleep", "/sleep", "/v1/wake_up", "/wake_up"),
    *("/v1/reset_prefix_cache", "/reset_prefix_cache", "/flush_cache"),
    *("/v1/update_weights", "/update_weights_from_disk"),
)
"""Changes of a server, which a router sends to all of its workers."""

ROUTES: Final[dict[str, Route]] = {
    **dict.fromkeys(("/", "/status", "/status.json", "/history.json", "/docs", "/openapi.json"), _PAGE),
    **dict.fromkeys(("/load", "/version", "/metrics"), _PAGE),
    **dict.fromkeys(("/health", "/ready"), _PROBE),
    "/ping": Route("probe", _BOTH),
    "/kv_events": Route("secret", _GET),
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"), _WORK),
    **dict.fromkeys(("/v1/responses", "/v1/responses/input_tokens"), _WORK),
    "/v1/responses/{response_id}": Route("key", ("DELETE", "GET"), forwarded=True),
    **dict.fromkeys(("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"), _WORK),
    **dict.fromkeys(("/v1/classify", "/classify", "/pooling", "/tokenize", "/detokenize"), _WORK),
    **dict.fromkeys(("/tokenizer_info", "/get_model_info"), Route("key", _GET, forwarded=True)),
    **dict.fromkeys(("/v1/models", "/v1/models/{model:path}"), Route("key", _GET)),
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/embed", "/api/show"), _WORK),
    **dict.fromkeys(("/api/tags", "/api/ps"), Route("key", _GET)),
    "/api/version": _PAGE,
    "/v1/requests": Route("key", _GET),
    "/v1/abort_requests": Route("key"),
    **dict.fromkeys(ON_EVERY_WORKER, Route("admin")),
    **dict.fromkeys(("/v1/control", "/is_paused", "/is_sleeping"), Route("admin", _GET)),
    **dict.fromkeys(("/v1/files", "/v1/batches"), Route("key", _BOTH)),
    "/v1/files/{file_id}": Route("key", ("DELETE", "GET")),
    **dict.fromkeys(("/v1/files/{file_id}/content", "/v1/batches/{batch_id}"), Route("key", _GET)),
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
