"""Who listens on a port of this machine, as Linux tells it: for the error of a port that is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_LISTENS: Final = "0A"
"""How /proc/net/tcp writes the state of a socket that listens."""


def port_holder(port: int) -> str | None:
    """Return the process that listens on `port`, for people; None where the system does not tell.

    Nothing of a command line is shown but the command of fdcore: flags may hold secrets.
    """
    try:
        inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net", table), port)}
    except (OSError, ValueError):
        return None
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    pids = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    pid = next((pid for pid in pids if _holds(pid, wanted)), None)
    return "a process of another user" if pid is None else _shown(pid)


def _listening(table: Path, port: int) -> list[str]:
    """Return the inodes of the sockets in a table of the system that listen on a port."""
    if not table.exists():
        return []
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]


def _holds(pid: int, links: set[str]) -> bool:
    try:
        return any(str(entry.readlink()) in links for entry in Path("/proc", str(pid), "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False


def _shown(pid: int) -> str:
    try:
        words = Path("/proc", str(pid), "cmdline").read_text(errors="replace").split("\0")
        name = Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:
        return f"process {pid}"
    for place, word in enumerate(words[:-1]):
        if word == "fd_core.cli" or word.rpartition("/")[2] == "fdcore":
            return f"`fdcore {words[place + 1]}`, process {pid}"
    return f"{name}, process {pid}"
