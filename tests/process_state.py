"""Check for running processes of this machine."""

from __future__ import annotations

from pathlib import Path

__all__ = ["lives"]


def lives(pid: int) -> bool:
    """Return True if a process has not ended; a zombie counts as ended, even if its parent has not reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
