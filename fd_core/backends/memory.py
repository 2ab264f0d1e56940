"""Host memory and processor time that are left for an engine, within control groups of versions 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")


def memory_left(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int | None:
    """Return the bytes up to the closest memory limit, None without one; file cache that can be dropped is not used."""
    left = []
    for folder in _folders("memory", groups, mount):
        limits = _numbers(folder, "memory.max", "memory.high", "memory.limit_in_bytes")
        used = _numbers(folder, "memory.current", "memory.usage_in_bytes")
        if limits and used:
            fields = (line.split() for line in _read(folder / "memory.stat").splitlines())
            cache = {words[0]: int(words[1]) for words in fields if len(words) == 2 and words[1].isdecimal()}
            # Version 1 counts children only under the name with "total".
            dropped = cache.get("total_inactive_file", cache.get("inactive_file", 0))
            left.append(max(min(limits) - used[0] + dropped, 0))
    return min(left, default=None)


def cpu_quota(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int | None:
    """Return the number of CPUs that the smallest CPU quota allows, rounded up; None without a quota."""
    quotas = []
    for folder in _folders("cpu", groups, mount):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            quotas.append(math.ceil(int(words[0]) / int(words[1])))
    return min(quotas, default=None)


def _folders(controller: str, groups: Path, mount: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups and of those above them.

    A container may see its group's name on the host while that group is mounted as its root, so folders may be missing.
    """
    for line in _read(groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        folder = root.joinpath(*(part for part in name.split("/") if part not in ("", "..")))
        yield from (root, *(parent for parent in (folder, *folder.parents) if root in parent.parents))


def _numbers(folder: Path, *names: str) -> list[int]:
    texts = [_read(folder / name).strip() for name in names]
    return [int(text) for text in texts if text.isdecimal()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


_MEMINFO = Path("/proc/meminfo")
_FALLBACK = 2 * 2**30


def available_memory() -> int:
    """Return the bytes that are available without swapping, within the memory limit of the container."""
    lines = _read(_MEMINFO).splitlines()
    amounts = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    left = memory_left()
    return min(amounts if left is None else [*amounts, left], default=_FALLBACK)
