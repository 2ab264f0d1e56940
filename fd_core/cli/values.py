"""How the text of a flag, an environment variable or a settings file becomes a value.

Every parser takes text or, from a TOML file, a typed value, and raises `ValueError` with a phrase that completes
"NAME: ...". The caller adds where the value came from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fd_core.config import SpeculativeConfig
from fd_core.sizes import parse_size

__all__ = [
    "Parser",
    "choice",
    "jinja",
    "keys",
    "keys_in_file",
    "names",
    "number",
    "optional_text",
    "secret_in_file",
    "size",
    "speculation",
    "switch",
    "whole",
]

Parser = Callable[[Any], Any]

_YES: Final = ("1", "true", "yes", "on")
_NO: Final = ("0", "false", "no", "off")
_SPECULATION: Final = '{"method": "ngram", "num_speculative_tokens": 3}'
_MAX_TEMPLATE_BYTES: Final = 1 << 20
_MAX_KEY_FILE_BYTES: Final = 1 << 20
_MIN_SECRET_CHARS: Final = 16


def whole(minimum: int = 0, maximum: int = 2**31 - 1) -> Parser:
    """Return a parser of whole numbers from `minimum` to `maximum`."""

    def parse(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,30}", value.strip()):
            value = int(value)
        if type(value) is not int:
            raise ValueError(f"{value!r} is not a whole number")
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not between {minimum} and {maximum}")
        return value

    return parse


def number(minimum: float, maximum: float, *, above: bool = False) -> Parser:
    """Return a parser of numbers from `minimum` (or just above it) to `maximum`."""

    def parse(value: Any) -> float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise ValueError(f"{value!r} is not a number") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{value!r} is not a number")
        if value > maximum or value < minimum or (above and value == minimum):
            lower = f"above {minimum:g}" if above else f"at least {minimum:g}"
            raise ValueError(f"{value:g} must be {lower} and at most {maximum:g}")
        return float(value)

    return parse


def choice(*words: str) -> Parser:
    """Return a parser that takes one of `words`."""

    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError(f"{value!r} is not one of {', '.join(words)}")
        return str(value)

    return parse


def optional_text(value: Any) -> str:
    """Return `value` as it is; it must be text and not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text")
    return value


def switch(value: Any) -> bool:
    """Return whether `value` means yes."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in (*_YES, *_NO):
        raise ValueError(f"{value!r} is neither true nor false")
    return word in _YES


def size(value: Any) -> int:
    """Return bytes: a number, with K, M, G, T for powers of 1000 or Ki, Mi, Gi, Ti for powers of 1024."""
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a size such as 256M, 1.5G or 512Mi")
    return parse_size(value)


def names(value: Any) -> tuple[str, ...]:
    """Return names from a list or from comma-separated text."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) and part.strip() for part in parts):
        raise ValueError("it must be one name or more, separated by commas")
    return tuple(part.strip() for part in parts)


def keys(value: Any) -> tuple[str, ...]:
    """Return API keys from a list or from one text. What is wrong is said without showing the key."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not parts:
        raise ValueError("it must be a key or a list of keys")
    for part in parts:
        if not isinstance(part, str) or not part or not all("!" <= letter <= "~" for letter in part):
            raise ValueError("a key must not be empty and may have visible ASCII characters only")
    return tuple(parts)


def keys_in_file(path: Any) -> tuple[str, ...]:
    """Return the API keys in a file, one a line."""
    lines = _read(Path(optional_text(path)), _MAX_KEY_FILE_BYTES).splitlines()
    return keys([line.strip() for line in lines if line.strip()])


def secret_in_file(path: Any) -> str:
    """Return the secret in a file: one line of at least 16 visible ASCII characters. It is never shown."""
    lines = keys_in_file(optional_text(path))
    if len(lines) != 1 or len(lines[0]) < _MIN_SECRET_CHARS:
        raise ValueError(f"{path} must hold one line of at least {_MIN_SECRET_CHARS} characters")
    return lines[0]


def jinja(value: Any) -> str:
    """Return a chat template: the text of the file that `value` names, or `value` itself if it is Jinja."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is neither a file nor a template")
    if "{{" in value or "{%" in value:
        return value
    return _read(Path(value), _MAX_TEMPLATE_BYTES)


def _read(path: Path, limit: int) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def speculation(value: Any) -> SpeculativeConfig:
    """Read how tokens are drafted: a JSON object, or a table of a settings file.

    Fields that the engine does not know itself go to the drafter, as in
    `{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}`.
    """
    try:
        table = msgspec.json.decode(value, type=dict[str, Any]) if isinstance(value, str) else dict(value)
        own = set(SpeculativeConfig.__struct_fields__) - {"options"}
        options = {name: table.pop(name) for name in list(table) if name not in own}
        return msgspec.convert({**table, "options": options}, SpeculativeConfig)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{error}; an example is {_SPECULATION}") from None
