"""Writing a file at once or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fd_core.errors import ConfigError

__all__ = ["require_writable", "write_whole"]


def require_writable(path: Path, flag: str) -> None:
    """Raise `ConfigError` that names `flag` if no file can be made there, before anything is computed for it."""
    folder = path.absolute().parent
    reason = "it is a folder" if path.is_dir() else None if folder.is_dir() else f"there is no folder {folder}"
    if reason is None and not os.access(folder, os.W_OK):
        reason = f"{folder} is not yours to write"
    if reason is not None:
        raise ConfigError(f"cannot write {path}: {reason}", field=flag)


def write_whole(path: Path, content: bytes, flag: str) -> None:
    """Write a file as a whole; what stood there before stays if that is not possible, and nothing is left of the try.

    Raises `ConfigError` that names the file and `flag`. What is no regular file, such as a pipe, is written as it is.
    """
    try:
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
