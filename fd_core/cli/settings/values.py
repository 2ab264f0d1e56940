"""How the text of a flag, an environment variable or a settings file becomes a value, where its type does not say it.

Every parser takes text or, from a TOML file, a typed value, and raises `ValueError` with a phrase that completes
"NAME: ...". The caller adds where the value came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fd_core.config import SpeculativeConfig
from fd_core.errors import ConfigError

Parser = Callable[[Any], Any]

_SPECULATION: Final = '{"method": "ngram", "num_speculative_tokens": 3}'
_MAX_FILE_BYTES: Final = 1 << 20
_MIN_SECRET_CHARS: Final = 16


def text(value: Any) -> str:
    """Return `value` as it is; it must be text and not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text")
    return value


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
    lines = read_text(Path(text(path))).splitlines()
    return keys([line.strip() for line in lines if line.strip()])


def key_file(path: Any) -> str:
    """Return the path of a file of API keys; what is wrong with it is said before anything is loaded."""
    from fd_core.http.access.key_file import read_key_file

    try:
        read_key_file(Path(text(path)))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return str(path)


def secret_in_file(path: Any) -> str:
    """Return the secret in a file: one line of at least 16 visible ASCII characters. It is never shown."""
    lines = keys_in_file(path)
    if len(lines) != 1 or len(lines[0]) < _MIN_SECRET_CHARS:
        raise ValueError(f"{path} must hold one line of at least {_MIN_SECRET_CHARS} characters")
    return lines[0]


def jinja(value: Any) -> str:
    """Return a chat template: the text of the file that `value` names, or `value` itself if it is Jinja."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is neither a file nor a template")
    if "{{" in value or "{%" in value:
        return value
    return read_text(Path(value))


def read_text(path: Path) -> str:
    """Return the text of a file of at most 1 MiB."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {_MAX_FILE_BYTES:,} bytes")
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
    except (ConfigError, msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{error}; an example is {_SPECULATION}") from None
