"""Files of API keys: TOML or JSON with a name, limits and rights for each key, or plain text with one key a line.

    [[keys]]
    name = "alice"
    sha256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    requests_per_minute = 60

A file that is not entirely right is refused as a whole, with the line and the field, and never with a key.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import stat
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from fd_core.errors import ConfigError
from fd_core.http.access.keys import ApiKey, KeyLimits

log = logging.getLogger(__name__)

FLAG: Final = "--api-key-file"
_MAX_FILE_BYTES: Final = 8 << 20
_MAX_KEYS: Final = 20_000
_MAX_KEY_CHARS: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,63}")
_VISIBLE: Final = re.compile(r"[!-~]+")
_FIELD: Final = re.compile(r"[a-z_]{1,32}")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_LIMITS: Final = KeyLimits.__struct_fields__
_FIELDS: Final = ("name", "key", "sha256", "admin", *_LIMITS)
_TABLE: Final = re.compile(rb"^[ \t]*\[\[[ \t]*keys[ \t]*\]\]", re.MULTILINE)
_MOST: Final = 10**12


class _Wrong(Exception):
    """What is wrong with one entry, and in which field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file, at least one: TOML or JSON if it is called so, else one key a line.

    Raises `ConfigError` that names file, line and field.
    """
    data = _read(path)
    kind = path.suffix.lower()
    if kind not in (".toml", ".json"):
        return _checked_lines(path, data)
    try:
        table = json.loads(data, object_pairs_hook=_once) if kind == ".json" else tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise _error(f"{path} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        # A parser names places and single characters, never a whole key.
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _error(f"{path} is not valid {kind[1:].upper()}: {reason}") from None
    entries = table.get("keys") if isinstance(table, dict) else None
    if not isinstance(entries, list) or not entries or len(table) > 1:
        raise _error(f"{path} must hold a list `keys` with at least one key, and nothing else")
    return _unique(path, entries, _entry, partial(_place_of, data, kind == ".json"))


def warn_if_others_read(path: Path) -> None:
    """Warn about a file of keys that other users of the machine can read."""
    mode = path.stat().st_mode
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s can be read by other users of this machine: chmod 600 keeps its keys secret", path)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _error(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise _error(f"{path} is larger than {_MAX_FILE_BYTES:,} bytes")
    return data


def _checked_lines(path: Path, data: bytes) -> tuple[ApiKey, ...]:
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise _error(f"{path} is not UTF-8 text") from None
    stripped = {line.strip(): number for number, line in reversed([*enumerate(lines, 1)])}
    numbered = sorted((number, line) for line, number in stripped.items() if line)
    if not numbered:
        raise _error(f"{path} holds no key")
    if any(line[0] in "[{" for _, line in numbered):
        raise _error(f"{path} looks like TOML or JSON", "call it .toml or .json, or write one key a line")
    return _unique(
        path,
        [line for _, line in numbered],
        lambda line: ApiKey.of(_key_text(line)),
        lambda n, _: f"line {numbered[n][0]}",
    )


def _unique(
    path: Path, entries: Sequence[Any], read: Callable[[Any], ApiKey], place_of: Callable[[int, str], str]
) -> tuple[ApiKey, ...]:
    """Read every entry; none may repeat the name or the key of another."""
    if len(entries) > _MAX_KEYS:
        raise _error(f"{path} holds {len(entries):,} keys; at most {_MAX_KEYS:,} are allowed")
    keys: list[ApiKey] = []
    seen: dict[str | bytes, int] = {}
    for number, entry in enumerate(entries):
        try:
            key = read(entry)
            for field, value in (("name", key.name), ("key", key.digest)):
                first = seen.setdefault(value, number) if value else number
                if first != number:
                    raise _Wrong(field, f"{place_of(first, field)} has the same {field}")
        except _Wrong as error:
            named = f", {error.field}" if error.field else ""
            raise _error(f"{path}, {place_of(number, error.field)}{named}: {error}") from None
        keys.append(key)
    return tuple(keys)


def _entry(entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise _Wrong("", "a key is a table with name, key or sha256, and limits")
    for field in entry:
        if field not in _FIELDS:
            close = difflib.get_close_matches(field[:64], _FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(_FIELDS)}"
            # Whoever mixes up the two sides of a line has written a key where a field's name belongs.
            raise _Wrong(field if _FIELD.fullmatch(field) else "", f"a field has no such name ({hint})")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _Wrong("name", "give 1 to 64 letters, digits or any of . _ @ : + -, a letter or digit first")
    if ("key" in entry) == ("sha256" in entry):
        raise _Wrong("key", "give either key or sha256")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise _Wrong("admin", "give true or false")
    for field in _LIMITS:
        value = entry.get(field, 1)
        if type(value) is not int or not 1 <= value <= _MOST:
            raise _Wrong(field, f"give a whole number from 1 to {_MOST:,}, or leave it out for no limit")
    limits = KeyLimits(**{field: entry[field] for field in _LIMITS if field in entry})
    if "key" in entry:
        digest = ApiKey.of(_key_text(entry["key"])).digest
    elif not isinstance(given := entry["sha256"], str) or not _SHA256.fullmatch(given):
        raise _Wrong("sha256", "give the 64 hexadecimal digits that `printf %s KEY | sha256sum` prints")
    else:
        digest = bytes.fromhex(given)
    return ApiKey(digest=digest, name=name, admin=admin, limits=limits)


def _key_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_KEY_CHARS or not _VISIBLE.fullmatch(value):
        raise _Wrong(
            "key",
            f"a key has 1 to {_MAX_KEY_CHARS:,} visible ASCII characters, and no space: clients send it in a header",
        )
    return value


def _place_of(data: bytes, is_json: bool, number: int, field: str) -> str:
    """Return the line of a field of an entry, or of the entry if the field is not found there."""
    starts = _json_starts(data) if is_json else [found.start() for found in _TABLE.finditer(data)]
    if number >= len(starts):  # written in another way, such as an array of inline tables
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
    except msgspec.MsgspecError:  # JSON that only the other parser reads, such as NaN
        return []
    for raw in map(bytes, entries):
        place = data.find(raw, place)
        starts.append(place)
        place += len(raw)
    return starts


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; a field that is given twice is refused, as TOML refuses it."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name if _FIELD.fullmatch(name) else 'a field'} is given twice in one object")
        table[name] = value
    return table


def _error(message: str, hint: str | None = None) -> ConfigError:
    return ConfigError(message, field=FLAG, hint=hint)
