"""Files that commands write at the request of users: checked before the work, and written whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from fd_core.errors import ConfigError

_STDOUT: Final = "-"


def require_writable(path: Path | None, flag: str) -> None:
    """Raise `ConfigError` for `flag` if no file can be created there, before its content is computed."""
    if path is None or str(path) == _STDOUT:
        return
    folder = path.absolute().parent
    reason = "it is a folder" if path.is_dir() else None if folder.is_dir() else f"the folder {folder} does not exist"
    if reason is None and not os.access(folder, os.W_OK):
        reason = f"{folder} is not writable"
    if reason is not None:
        raise ConfigError(f"cannot write {path}: {reason}", field=flag)


def write_whole(path: Path, content: bytes, flag: str) -> None:
    """Write a file atomically, or to standard output for `-`; on failure the previous file stays.

    Raises `ConfigError` that names the file and `flag`. A file that is not regular (a pipe) is written directly.
    """
    try:
        if str(path) == _STDOUT:
            sys.stdout.buffer.write(content)
            return
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot write {path}: {reason}", field=flag) from error


def write_json(path: Path | None, value: Any, flag: str = "--json") -> None:
    """Write a value as indented JSON if there is a `path`, see `write_whole`."""
    if path is not None:
        write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n", flag)
