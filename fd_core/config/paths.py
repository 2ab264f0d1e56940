"""The cache folder of fd_core, and the paths and small files that users name."""

from __future__ import annotations

import os
from pathlib import Path

from fd_core.errors import ConfigError


def find_cache_dir(chosen: Path | None = None) -> Path:
    """Return the folder chosen, $FD_CACHE, $XDG_CACHE_HOME/fd_core or ~/.cache/fd_core; `ConfigError` if no home."""
    if os.environ.get("FD_CACHE") or chosen is not None:
        return user_path(chosen or os.environ["FD_CACHE"], "FD_CACHE")
    if os.environ.get("XDG_CACHE_HOME"):
        return user_path(os.environ["XDG_CACHE_HOME"], "XDG_CACHE_HOME") / "fd_core"
    return user_path("~/.cache/fd_core", "FD_CACHE")


def user_path(text: str | Path, field: str) -> Path:
    """Return the path with its ~ replaced. Raises `ConfigError` for `field` if that home folder is unknown."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"the home folder in {str(text)!r} is unknown", field=field, hint="use a path without ~"
        ) from None


def read_bounded(path: Path, max_bytes: int, field: str | None = None) -> bytes:
    """Return the content of a file of at most `max_bytes`, a pipe included. Raises `ConfigError` for `field`."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", field=field) from error
    if len(data) > max_bytes:
        raise ConfigError(f"{path} is larger than {max_bytes:,} bytes", field=field)
    return data
