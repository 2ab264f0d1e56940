"""Runs a child process: `python -P -m fd_core.launching.child CORES -m MODULE ARGUMENTS...`.

Standard input is a socket to the parent. The process ends when the other end closes, because it is then no longer
supervised. CORES are numbers of processors, such as `0,1`; empty means all. Libraries count the processors as soon as
they are imported, so nothing is imported before.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

from fd_core.launching.announcing import open_channel


def child_command(cores: Sequence[int], *command: str) -> list[str]:
    """Return the command that starts a child on `cores`, all if empty; `command` is `-m MODULE ARGUMENTS...`."""
    # -P: ignore modules in the current directory.
    return [sys.executable, "-P", "-m", "fd_core.launching.child", ",".join(map(str, cores)), *command]


@contextlib.contextmanager
def child_socket() -> Iterator[tuple[socket.socket, int]]:
    """Give a new socket to a child, and the descriptor that the block starts the child with as standard input."""
    own, theirs = socket.socketpair()
    with theirs:
        try:
            yield own, theirs.fileno()
        except BaseException:
            own.close()
            raise


def become_child() -> None:
    """Log as the parent does, and ignore Ctrl-C, which reaches the terminal's whole group: the parent decides."""
    from fd_core.config.logs import configure_logs

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    level, form = os.environ.get("FD_LOG_LEVEL", "WARNING"), os.environ.get("FD_LOG_FORMAT", "text")
    configure_logs(level, form, text="%(levelname)s %(message)s", access=os.environ.get("FD_ACCESS_LOG") == "1")


def main(cores: str, _: str, module: str, *arguments: str) -> None:
    """Become the module."""
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    open_channel()
    threading.Thread(target=_end_with_parent, args=(os.dup(0),), name="fdcore-parent-watch", daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_parent(descriptor: int) -> None:
    """End this process once the other end of standard input is closed, even if the parent crashed; reads nothing."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", 0))  # outside Linux a hang-up is always reported
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
