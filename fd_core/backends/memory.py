"""How much host memory is left for an engine."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_memory"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_FALLBACK = 2 * 2**30


def available_memory() -> int:
    """Return bytes that the system, or the container if that is smaller, can give without swapping."""
    amounts = [_from_meminfo(), _from_cgroup()]
    return min((amount for amount in amounts if amount is not None), default=_FALLBACK)


def _from_meminfo() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _from_cgroup() -> int | None:
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
        used = _CGROUP_USED.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return max(int(limit) - int(used), 0) if limit.isdigit() and used.isdigit() else None
