"""Runs a launched process: `python -P -m fd_core.launching.child CORES -m MODULE ARGUMENTS...`.

It ends when standard input closes, for then nobody watches over it any more. CORES are numbers of processors, such as
`0,1`; empty means all. Libraries count the processors as soon as they are imported, so nothing is imported before.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading

_channel: list[int] = []
"""The descriptor to write to, in a launched process."""


def open_channel() -> None:
    """Have announcements go to standard input, which is a socket in a launched process."""
    _channel[:] = [sys.stdin.fileno()]


def announce(text: str) -> None:
    """Say where this process is reached, such as `http://127.0.0.1:8000`. Does nothing in one that was not launched."""
    for descriptor in _channel:
        os.write(descriptor, f"{text}\n".encode())


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


def main(cores: str, _: str, module: str, *arguments: str) -> None:
    """Become the module."""
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    open_channel()
    end_with_parent()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
