"""JSON files beside the weights, read with a limit on size and depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fd_core.errors import ModelError

__all__ = ["parse_json_object", "read_json_object", "read_limited"]

_LIMIT = 64 << 20


def read_limited(path: Path, limit: int = _LIMIT) -> bytes:
    """Read a whole file of at most `limit` bytes; `ModelError` if it is larger or cannot be read."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise ModelError(f"{path} has {size} bytes, the limit is {limit}", field="model")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}", field="model") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file whose top level is an object; `ModelError` names the file otherwise."""
    return parse_json_object(read_limited(path), str(path))


def parse_json_object(content: bytes, origin: str) -> dict[str, Any]:
    """Parse JSON whose top level is an object; `ModelError` names `origin` otherwise."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"{origin} is not a JSON object: {error}", field="model") from error
