"""Follows a process that writes what it finds as lines of JSON, one event a line."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

_POLL_SECONDS: Final = 0.05


class SilentError(Exception):
    """The process wrote nothing for as long as it may."""


def follow(process: subprocess.Popen[bytes], path: Path, kind: Any, most_quiet_seconds: float) -> Iterator[Any]:
    """Yield the events, of type `kind`, that the process writes to `path`, until it ends; a line cut off is left out.

    Raises `SilentError` after so many seconds without an event; the process is then still running.
    """
    path.touch()
    changed, rest = time.monotonic(), b""
    with path.open("rb") as file:
        while True:
            over = process.poll() is not None
            if new := file.read():
                changed = time.monotonic()
                *lines, rest = (rest + new).split(b"\n")
                for line in lines:
                    yield msgspec.json.decode(line, type=kind)
            elif over:
                return
            elif time.monotonic() - changed > most_quiet_seconds:
                raise SilentError
            else:
                time.sleep(_POLL_SECONDS)
