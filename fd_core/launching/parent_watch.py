"""Ends a child process when its parent is gone, however the parent ended: the pipe to standard input closes then."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def end_with_parent() -> None:
    """End this process, from a thread, once standard input closes.

    The parent keeps the other end open as long as it lives.
    """
    threading.Thread(target=_wait_for_the_end, name="fdcore-parent-watch", daemon=True).start()


def _wait_for_the_end() -> None:
    # The bare descriptor: a thread that waits inside the buffered reader makes the interpreter's shutdown fail.
    with contextlib.suppress(OSError):  # a socket whose other end had something left to read
        while os.read(sys.stdin.fileno(), 4096):
            pass
    os._exit(0)
