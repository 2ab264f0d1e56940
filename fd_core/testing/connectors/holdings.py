"""Census of what a process holds, taken before and after a case to find leaks."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

from fd_core.testing.connectors.far_messages import Census


def census() -> Census:
    """Return what this process holds; descriptors and mappings only where there is /proc."""
    gc.collect()
    threads = tuple(sorted(thread.name for thread in threading.enumerate()))
    own = Path("/proc/self")
    if not own.exists():
        return Census((), (), threads)
    descriptors = []
    for entry in (own / "fd").iterdir():
        try:
            descriptors.append(str(entry.readlink()))
        except OSError:
            continue  # the descriptor of the listing itself
    lines = [line.split(maxsplit=5) for line in (own / "maps").read_text().splitlines()]
    mapped = [line[5] for line in lines if len(line) == 6 and "s" in line[1]]
    return Census(tuple(sorted(descriptors)), tuple(sorted(mapped)), threads)


def more(there: tuple[str, ...], then: tuple[str, ...]) -> list[str]:
    """Return the names that are `there` more often than they were `then`."""
    return [one for one in set(there) if there.count(one) > then.count(one)]
