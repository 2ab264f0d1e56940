"""Ends a child process when its parent is gone, however the parent ended: standard input closes then."""

from __future__ import annotations

import os
import select
import sys
import threading


def end_with_parent() -> None:
    """End this process, from a thread, once the other end of standard input closes; reads nothing of it.

    The parent keeps the other end open as long as it lives.
    """
    descriptor = os.dup(sys.stdin.fileno())
    threading.Thread(target=_wait_for_the_end, args=(descriptor,), name="fdcore-parent-watch", daemon=True).start()


def _wait_for_the_end(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(0)
