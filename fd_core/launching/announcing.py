"""Announcement of a launched process's address: a line to its launcher."""

from __future__ import annotations

import os
import sys

_channel: list[int] = []
"""The descriptor to write to, in a launched process."""


def open_channel() -> None:
    """Send announcements to standard input, which is a socket in a launched process."""
    _channel[:] = [sys.stdin.fileno()]


def announce(text: str) -> None:
    """Announce the address of this process, such as `http://127.0.0.1:8000`. Does nothing if it was not launched."""
    for descriptor in _channel:
        os.write(descriptor, f"{text}\n".encode())
