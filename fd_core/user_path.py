"""Paths that people write, in which ~ stands for a home folder."""

from __future__ import annotations

from pathlib import Path

from fd_core.errors import ConfigError

__all__ = ["user_path"]


def user_path(text: str | Path, field: str) -> Path:
    """Return the path with its ~ replaced. Raises `ConfigError` for `field` if that home folder is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"the home folder in {str(text)!r} is not known here", field=field, hint="write the path without ~"
        ) from None
