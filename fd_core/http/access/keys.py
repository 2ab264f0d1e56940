"""API keys: reading their files, matching the key of a request, and counting usage.

There is no clock: readings are passed in.

The window of a limit slides: in any 60 seconds, the admitted usage never exceeds the limit. A request reserves
its tokens when it begins, as many as it may read and write, and returns unused ones at its end.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import hmac
import json
import logging
import math
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fd_core.config.paths import read_bounded
from fd_core.errors import ConfigError

WINDOW_SECONDS: Final = 60.0
_SLOT_SECONDS: Final = 0.25
"""Resolution of the window: usage admitted within one slot counts until the whole slot is a minute old."""

Limited = Literal["requests", "tokens", "parallel"]
_Limit = Annotated[int, Meta(ge=1, le=10**12)]
log = logging.getLogger(__name__)

FLAG: Final = "--api-key-file"
_MAX_FILE_BYTES: Final = 8 << 20
_MAX_KEYS: Final = 20_000
_MAX_KEY_CHARS: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,63}")
_VISIBLE: Final = re.compile(r"[!-~]+")
_FIELD: Final = re.compile(r"[a-z_]{1,32}")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_TABLE: Final = re.compile(rb"^[ \t]*\[\[[ \t]*keys[ \t]*\]\]", re.MULTILINE)
_MOST: Final = 10**12


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one key; None sets no limit."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    """Of prompts and texts together."""
    parallel_requests: _Limit | None = None
    """Requests that are answered at the same time, streamed or whole."""


_FIELDS: Final = ("name", "key", "sha256", "admin", *KeyLimits.__struct_fields__)


class LimitReached(Exception):
    """A request would exceed a limit of its key."""

    def __init__(self, limited: Limited, limit: int, used: int, asked: int, wait: float | None) -> None:
        super().__init__(limited)
        self.limited = limited
        self.limit = limit
        self.used = used
        self.asked = asked
        self.wait = wait
        """Seconds until it fits, if nothing else is admitted meanwhile; None if it never fits."""


class SlidingWindow:
    """Sum of the additions within the last minute, in bounded memory."""

    __slots__ = ("_latest", "_slots", "used")

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._latest = -math.inf
        self.used = 0

    def advance(self, now: float) -> None:
        """Forget entries older than a minute. A clock that goes backwards has no effect."""
        self._latest = max(self._latest, now)
        for slot in list(self._slots):
            if _end_of(slot) > self._latest:
                break
            self.used -= self._slots.pop(slot)

    def add(self, now: float, amount: int) -> int:
        """Add to the current slot, and return its number."""
        self.advance(now)
        slot = math.floor(self._latest / _SLOT_SECONDS)
        self._slots[slot] = self._slots.get(slot, 0) + amount
        self.used += amount
        return slot

    def give_back(self, slot: int, amount: int) -> None:
        """Subtract from a slot; no effect if its minute has passed."""
        if slot in self._slots:
            self._slots[slot] -= amount
            self.used -= amount

    def wait(self, now: float, excess: int) -> float:
        """Return the seconds until `excess` of the sum has expired."""
        self.advance(now)
        for slot, amount in self._slots.items():
            excess -= amount
            if excess <= 0:
                return _end_of(slot) - self._latest
        return 0.0

    def reset(self, now: float) -> float:
        """Return the seconds until the sum is zero, if nothing is added."""
        self.advance(now)
        return max((_end_of(slot) - self._latest for slot, amount in self._slots.items() if amount), default=0.0)


class KeyAccount:
    """Usage of one key."""

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        """May be replaced; earlier usage still counts."""
        self.running = 0
        self.requests = SlidingWindow()
        self.tokens = SlidingWindow()

    def enter(self, now: float) -> None:
        """Admit a request, which counts in `running`. Raises `LimitReached`; a rejected request uses nothing."""
        limits = self.limits
        if limits.parallel_requests is not None and self.running >= limits.parallel_requests:
            raise LimitReached("parallel", limits.parallel_requests, self.running, asked=1, wait=1.0)
        if limits.requests_per_minute is not None:
            _require("requests", self.requests, limits.requests_per_minute, now=now, asked=1)
            self.requests.add(now, 1)
        self.running += 1

    def reserve(self, now: float, tokens: int) -> Reservation:
        """Reserve tokens. Raises `LimitReached`."""
        limit = self.limits.tokens_per_minute
        if limit is None:
            return Reservation(self, None, tokens)
        _require("tokens", self.tokens, limit, now=now, asked=tokens)
        return Reservation(self, self.tokens.add(now, tokens), tokens)


class Reservation:
    """Tokens that one request reserved."""

    __slots__ = ("_account", "_open", "_slot", "tokens")

    def __init__(self, account: KeyAccount, slot: int | None, tokens: int) -> None:
        self._account = account
        self._slot = slot
        self._open = True
        self.tokens = tokens

    def settle(self, now: float, used: int) -> None:
        """Return unused tokens, once; usage beyond the reservation is charged now, even above the limit."""
        if not self._open or self._slot is None:
            return
        self._open = False
        if used > self.tokens:
            self._account.tokens.add(now, used - self.tokens)
        else:
            self._account.tokens.give_back(self._slot, self.tokens - max(0, used))


def _require(limited: Limited, window: SlidingWindow, limit: int, now: float, asked: int) -> None:
    window.advance(now)
    excess = window.used + asked - limit
    if excess > 0:
        raise LimitReached(limited, limit, window.used, asked, None if asked > limit else window.wait(now, excess))


def _end_of(slot: int) -> float:
    """Return the time at which a slot has expired."""
    return (slot + 1) * _SLOT_SECONDS + WINDOW_SECONDS


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key, without its text."""

    digest: bytes
    """SHA-256 of the key."""
    name: str = ""
    """Name in logs and metrics; None for a key without a name."""
    admin: bool = False
    """True if the key may act on the requests of others."""
    limits: KeyLimits = KeyLimits()

    @staticmethod
    def of(text: str) -> ApiKey:
        """Return a key without name and limits."""
        return ApiKey(digest=_digest(text.encode("utf-8", "surrogateescape")))

    @property
    def owner(self) -> str:
        """Owner of the key's data: a digest of the name, so that the key can be replaced, or else of the key."""
        if self.name:
            return hashlib.blake2b(self.name.encode(), digest_size=16, person=b"fd_core key name").hexdigest()
        return hashlib.blake2b(self.digest, digest_size=16, person=b"fd_core owner").hexdigest()


def scoped(owner: str, name: str | None) -> str:
    """Return a client's name, scoped to its owner; unchanged if there are no keys."""
    return f"{owner}/{name or ''}" if owner else name or ""


class KeyRing:
    """The accepted keys. Without any, every request is accepted.

    Keys are found by a digest that is keyed with a secret of this process: clients cannot predict the order of keys, so
    the time of a search reveals nothing about any number of keys.
    """

    def __init__(self, keys: Iterable[ApiKey | str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._nobody = ApiKey(digest=secrets.token_bytes(32))
        all_keys = [ApiKey.of(key) if isinstance(key, str) else key for key in keys]
        self._keys = {self._slot_of(key.digest): key for key in all_keys}
        self._owners = {key.owner: key for key in all_keys}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys.values())

    def of_owner(self, owner: str) -> ApiKey | None:
        """Return the key of an owner, None if there is none or it was removed."""
        return self._owners.get(owner)

    def find(self, authorization: bytes | None, api_key: bytes | None = None, *, basic: bool = False) -> ApiKey | None:
        """Return the key of `Bearer KEY` or `x-api-key`, with `basic` of a browser's password too; None for no key."""
        scheme, _, given = (authorization or b"").partition(b" ")
        kind = scheme.lower()
        if basic and kind == b"basic":
            kind, given = b"bearer", _password(given)
        sent = ((given, kind == b"bearer"), (api_key or b"", api_key is not None))
        matches = [found for text, counts in sent if (found := self._find(text.strip())) is not None and counts]
        return matches[0] if matches else None

    def _find(self, text: bytes) -> ApiKey | None:
        digest = _digest(text)
        found = self._keys.get(self._slot_of(digest), self._nobody)
        return found if hmac.compare_digest(digest, found.digest) else None

    def _slot_of(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, digest_size=16, key=self._secret).digest()


def _password(given: bytes) -> bytes:
    try:
        return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class _InvalidEntry(Exception):
    """Error in one entry, with the field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file, at least one: TOML or JSON if it is called so, else one key a line.

        [[keys]]
        name = "alice"
        sha256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
        requests_per_minute = 60

    Raises `ConfigError` with file, line and field, and never with a key, for any invalid entry.
    """
    data = read_bounded(path, _MAX_FILE_BYTES, FLAG)
    kind = path.suffix.lower()
    if kind not in (".toml", ".json"):
        return _checked_lines(path, data)
    try:
        table = json.loads(data, object_pairs_hook=_once) if kind == ".json" else tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise _error(f"{path} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        # Parser errors contain positions and single characters, never a whole key.
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _error(f"{path} is not valid {kind[1:].upper()}: {reason}") from None
    entries = table.get("keys") if isinstance(table, dict) else None
    if not isinstance(entries, list) or not entries or len(table) > 1:
        raise _error(f"{path} must hold a list `keys` with at least one key, and nothing else")
    return _unique(path, entries, _entry, place_of=partial(_place_of, data, kind == ".json"))


def warn_if_others_read(path: Path) -> None:
    """Warn about a file of keys that other users of the machine can read."""
    mode = path.stat().st_mode
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s is readable by other users of this machine; run chmod 600 to keep its keys secret", path)


def _checked_lines(path: Path, data: bytes) -> tuple[ApiKey, ...]:
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise _error(f"{path} is not UTF-8 text") from None
    stripped = {line.strip(): number for number, line in reversed([*enumerate(lines, 1)])}
    numbered = sorted((number, line) for line, number in stripped.items() if line)
    if not numbered:
        raise _error(f"{path} contains no key")
    if any(line[0] in "[{" for _, line in numbered):
        raise _error(f"{path} looks like TOML or JSON", "rename it to .toml or .json, or write one key per line")
    return _unique(
        path,
        [line for _, line in numbered],
        lambda line: ApiKey.of(_key_text(line)),
        place_of=lambda n, _: f"line {numbered[n][0]}",
    )


def _unique(
    path: Path, entries: Sequence[Any], read: Callable[[Any], ApiKey], place_of: Callable[[int, str], str]
) -> tuple[ApiKey, ...]:
    """Read every entry; none may repeat the name or the key of another."""
    if len(entries) > _MAX_KEYS:
        raise _error(f"{path} has {len(entries):,} keys; at most {_MAX_KEYS:,} are allowed")
    keys: list[ApiKey] = []
    seen: dict[str | bytes, int] = {}
    for number, entry in enumerate(entries):
        try:
            key = read(entry)
            for field, value in (("name", key.name), ("key", key.digest)):
                first = seen.setdefault(value, number) if value else number
                if first != number:
                    raise _InvalidEntry(field, f"{place_of(first, field)} has the same {field}")
        except _InvalidEntry as error:
            named = f", {error.field}" if error.field else ""
            raise _error(f"{path}, {place_of(number, error.field)}{named}: {error}") from None
        keys.append(key)
    return tuple(keys)


def _entry(entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise _InvalidEntry("", "expected a table with name, key or sha256, and limits")
    for field in entry:
        if field not in _FIELDS:
            close = difflib.get_close_matches(field[:64], _FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(_FIELDS)}"
            # If a user swaps the two sides of a line, the field name is a key and must not be shown.
            raise _InvalidEntry(field if _FIELD.fullmatch(field) else "", f"unknown field ({hint})")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _InvalidEntry(
            "name", "expected 1 to 64 letters, digits or any of . _ @ : + -, starting with a letter or digit"
        )
    if ("key" in entry) == ("sha256" in entry):
        raise _InvalidEntry("key", "specify either key or sha256")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise _InvalidEntry("admin", "expected true or false")
    for field in KeyLimits.__struct_fields__:
        value = entry.get(field, 1)
        if type(value) is not int or not 1 <= value <= _MOST:
            raise _InvalidEntry(field, f"expected an integer from 1 to {_MOST:,}; omit it for no limit")
    limits = KeyLimits(**{field: value for field, value in entry.items() if field in KeyLimits.__struct_fields__})
    if "key" in entry:
        digest = ApiKey.of(_key_text(entry["key"])).digest
    elif not isinstance(given := entry["sha256"], str) or not _SHA256.fullmatch(given):
        raise _InvalidEntry("sha256", "expected the 64 hexadecimal digits that `printf %s KEY | sha256sum` prints")
    else:
        digest = bytes.fromhex(given)
    return ApiKey(digest=digest, name=name, admin=admin, limits=limits)


def _key_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_KEY_CHARS or not _VISIBLE.fullmatch(value):
        raise _InvalidEntry(
            "key",
            f"expected 1 to {_MAX_KEY_CHARS:,} visible ASCII characters without spaces, because keys are sent in a "
            "header",
        )
    return value


def _place_of(data: bytes, is_json: bool, number: int, field: str) -> str:
    """Return the line of a field of an entry, or of the entry if the field is not found there."""
    starts = _json_starts(data) if is_json else [found.start() for found in _TABLE.finditer(data)]
    if number >= len(starts):  # another syntax, such as an array of inline tables
        return f"entry {number + 1}"
    end = starts[number + 1] if number + 1 < len(starts) else len(data)
    pattern = rb'"%b"[ \t\r\n]*:' if is_json else rb'^[ \t]*"?%b"?[ \t]*='
    found = re.compile(pattern % re.escape(field.encode()), re.MULTILINE).search(data, starts[number], end)
    place = found.start() if field and found else starts[number]
    newlines = data.count(b"\n", 0, place)
    return f"line {newlines + 1}"


def _json_starts(data: bytes) -> list[int]:
    starts, place = [], 0
    try:
        entries = msgspec.json.decode(data, type=dict[str, list[msgspec.Raw]])["keys"]
    except msgspec.MsgspecError:  # JSON that only the other parser accepts, such as NaN
        return []
    for raw in map(bytes, entries):
        place = data.find(raw, place)
        starts.append(place)
        place += len(raw)
    return starts


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; a duplicate field is rejected, as in TOML."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name if _FIELD.fullmatch(name) else 'a field'} is duplicated in one object")
        table[name] = value
    return table


def _error(message: str, hint: str | None = None) -> ConfigError:
    return ConfigError(message, field=FLAG, hint=hint)
