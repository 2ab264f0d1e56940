"""How much host memory is left for an engine."""

from __future__ import annotations

from pathlib import Path

from fd_core.backends.cgroups import memory_left

_MEMINFO = Path("/proc/meminfo")
_FALLBACK = 2 * 2**30


def available_memory() -> int:
    """Return bytes that the system, or the container if that is smaller, can give without swapping."""
    amounts = [_from_meminfo(), memory_left()]
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
