"""Record of one request while it is answered, its usage, and its line in the access log.

A router reads the usage of an answer from its `usage`, from a comment that workers put into a stream of events, or from
the counts in the last line of a stream of JSON lines.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from typing import Final, NamedTuple

import msgspec

from fd_core.config.logs import ACCESS_LOGGER, one_word
from fd_core.http.access.keys import ApiKey, KeyAccount, Reservation

TENANT_HEADER: Final = "X-FD-Tenant"
_HEADER: Final = re.compile(r"([0-9a-f]{32}) (admin|user) (\d{0,13}) ([0-9a-f]{64})")
CLIENT_LEFT: Final = 499
"""Status of a request whose client disconnected before the answer ended."""
log = logging.getLogger(ACCESS_LOGGER)
_LINE: Final = (
    "%(client)s %(method)s %(path)s %(status)d %(seconds).3f s in=%(tokens_in)d out=%(tokens_out)d id=%(request_id)s "
    "key=%(key)s"
)
USAGE_HEADER: Final = "X-FD-Usage"
"""Header with which a router requests the comment from a worker."""
_COMMENT: Final = re.compile(rb"^: usage (\d{1,12}) (\d{1,12})\n\n", re.MULTILINE)
_MARK: Final = b": usage "
_EVENT: Final = b"\ndata: "
_LAST_LINE: Final = b'"done":true'


class Tenant(NamedTuple):
    """A key of a router, as a worker sees it: the owner of a request that the router forwards.

    A worker sees one key, the router's. The header, signed with that key, names the client's key for one request only:
    method, path and request id are signed as well. A tenant owns only a part of what the signing key owns, so a client
    gains nothing from a header signed with its own key.
    """

    owner: str
    """See `ApiKey.owner`."""
    admin: bool = False
    tokens_per_minute: int | None = None

    @staticmethod
    def of(key: ApiKey) -> Tenant:
        """Return the tenant of a key of the router."""
        return Tenant(key.owner, key.admin, key.limits.tokens_per_minute)


def sign_tenant(secret: bytes, tenant: Tenant, method: str, path: str, request_id: str) -> str:
    """Return the header of one request; `secret` is the SHA-256 of the worker's key, `path` the decoded path."""
    limit = tenant.tokens_per_minute
    text = f"{tenant.owner} {'admin' if tenant.admin else 'user'} {'' if limit is None else limit}"
    return f"{text} {_mac(secret, text, method, path, request_id)}"


def read_tenant(secret: bytes | None, header: bytes, method: str, path: str, request_id: str) -> Tenant | None:
    """Return a header's tenant, None unless signed for this request; without keys, and so a `secret`, it is trusted."""
    found = _HEADER.fullmatch(header.decode("latin-1"))
    if found is None:
        return None
    owner, right, limit, mac = found.groups()
    if secret is not None:
        good = _mac(secret, f"{owner} {right} {limit}", method, path, request_id)
        if not hmac.compare_digest(mac, good):
            return None
    return Tenant(owner, right == "admin", int(limit) if limit else None)


def _mac(secret: bytes, *parts: str) -> str:
    text = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (each.encode("utf-8", "replace") for each in parts))
    return hmac.new(secret, b"fd_core tenant" + text, hashlib.sha256).hexdigest()


def log_access(client: str, method: str, path: str, status: int, seconds: float, record: RequestRecord) -> None:
    """Write the line of a finished request; `path` is without its query, which may contain secrets."""
    fields = {
        "client": client,
        "method": one_word(method, 16),
        "path": one_word(path, 256),
        "status": status,
        "seconds": round(seconds, 6),
        "tokens_in": record.tokens_in,
        "tokens_out": record.tokens_out,
        "request_id": record.request_id,
        "key": record.key.name or "unnamed" if record.key is not None else "-",
    }
    log.info(_LINE, fields, extra={"fields": fields})


class _Usage(msgspec.Struct):
    """Usage in OpenAI's and Anthropic's responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class _Metered(msgspec.Struct):
    usage: _Usage | None = None
    prompt_eval_count: int = 0
    """Ollama's counts."""
    eval_count: int = 0


_decoder: Final = msgspec.json.Decoder(_Metered)


def usage_comment(tokens_in: int, tokens_out: int) -> bytes:
    """Return the comment that reports the usage of a stream; clients of server-sent events ignore it."""
    return b"%b%d %d\n\n" % (_MARK, tokens_in, tokens_out)


class UsageMeter:
    """Reads the usage of one answer as it passes."""

    __slots__ = ("_events", "_usage")

    def __init__(self) -> None:
        self._usage: tuple[int, int] | None = None
        self._events = 0

    def whole(self, body: bytes) -> None:
        """Read the usage of a complete response; one that reports none, such as an error, used no tokens."""
        self._usage = _reported(body) or (0, 0)

    def piece(self, events: bytes) -> bytes:
        """Process whole events or lines; return them without the comment, which is not meant for clients."""
        if events.startswith(b"{"):  # lines of JSON
            self._events += events.count(b"\n")
            last = events.rstrip().rpartition(b"\n")[2]
            if _LAST_LINE in last:
                self._usage = _reported(last) or self._usage
            return events
        self._events += events.count(_EVENT) + events.startswith(_EVENT[1:])
        if _MARK in events and (found := _COMMENT.search(events)) is not None:
            self._usage = int(found[1]), int(found[2])
            return events[: found.start()] + events[found.end() :]
        return events

    def tokens(self, prompt: int) -> tuple[int, int] | None:
        """Return the tokens read and written, None if not reported; for a stream without a report, count events."""
        if self._usage is None and self._events:
            return prompt, self._events
        return self._usage


def _reported(body: bytes) -> tuple[int, int] | None:
    try:
        answer = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    usage = answer.usage
    if usage is None:
        counts = answer.prompt_eval_count, answer.eval_count
        return counts if any(counts) else None
    read = usage.prompt_tokens or usage.input_tokens + usage.cache_read_input_tokens
    return read, usage.completion_tokens or usage.output_tokens


class RequestRecord(msgspec.Struct, eq=False):
    """Filled in from the gate to the last token; read for headers, the access log and the limits of the key."""

    request_id: str = ""
    key: ApiKey | None = None
    """None if there are no keys, or the path requires none."""
    tenant: Tenant | None = None
    """The client's key at the router that sent this request; None if the client connected directly."""
    account: KeyAccount | None = None
    """Usage of the key while this request counts in it; None for a key without limits."""
    tokens_in: int = 0
    tokens_out: int = 0
    reservation: Reservation | None = None

    @property
    def owner(self) -> str:
        """Owner of the request, see `ApiKey.owner`; "" without a key. A tenant owns a part of its router's data."""
        own = "" if self.key is None else self.key.owner
        return own if self.tenant is None else f"{own}.{self.tenant.owner}"

    @property
    def is_admin(self) -> bool:
        """True if the request may change state shared by all keys. Always true without keys."""
        return (self.key is None or self.key.admin) and (self.tenant is None or self.tenant.admin)

    def may_abort(self, owner: str) -> bool:
        """Return True if this request may abort an owner's requests; a router's admin may abort all of that router."""
        if self.is_admin or owner == self.owner:
            return True
        return self.tenant is not None and self.tenant.admin and owner.startswith(self.owner.partition(".")[0] + ".")

    @property
    def tokens_per_minute(self) -> int | None:
        """The limit of tokens, None if there is none; of a tenant it is the one that its router counts."""
        if self.tenant is not None and self.tenant.tokens_per_minute is not None:
            return self.tenant.tokens_per_minute
        return None if self.account is None else self.account.limits.tokens_per_minute

    def reserve(self, tokens: int) -> None:
        """Reserve tokens. Raises `LimitReached`."""
        if self.account is not None:
            self.reservation = self.account.reserve(time.monotonic(), tokens)

    def count(self, tokens_in: int, tokens_out: int) -> None:
        """Count tokens that were read and written."""
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out

    def settle(self) -> None:
        """Return unused tokens of the reservation."""
        if self.reservation is not None:
            self.reservation.settle(time.monotonic(), self.tokens_in + self.tokens_out)

    def close(self) -> None:
        """End the request's share of the parallel requests of its key; further calls have no effect."""
        if self.account is not None:
            self.account.running -= 1
            self.account = None
