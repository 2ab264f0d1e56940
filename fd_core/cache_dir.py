"""Where fd_core keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["find_cache_dir"]


def find_cache_dir(chosen: Path | None = None) -> Path:
    """Return the cache folder: the one chosen, else $FD_CACHE, $XDG_CACHE_HOME/fd_core or ~/.cache/fd_core."""
    if chosen is not None:
        return chosen.expanduser()
    if os.environ.get("FD_CACHE"):
        return Path(os.environ["FD_CACHE"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]).expanduser() / "fd_core"
    return Path("~/.cache/fd_core").expanduser()
