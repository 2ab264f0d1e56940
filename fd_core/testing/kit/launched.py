"""Program launched by the kit of launchers: reports its environment and executes commands.

It is not in the package of that kit, whose import takes most of a second in each process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

from fd_core.launching.announcing import announce

LONG_LINE: Final = 200_000
"""Characters of a line, such as a config in JSON, that exceeds the buffer of a usual reader."""
LINES: Final = 40_000
"""Lines that exceed what a launcher may keep of each process."""
CHILD_SECONDS: Final = 8.0


def main(action: str, *arguments: str) -> None:
    """Print this process's environment, then run until it is ended; the action is

    - `fail`: print the arguments as lines, the first one with a byte that is not UTF-8, the last one after a long one,
      `LINES` others and without an end of its line, and exit with code 7;
    - `leave`: announce the last argument, print it without an end of its line, and exit with code 7; a child keeps the
      output open for `CHILD_SECONDS`;
    - `exit`: print the last argument as an error, and exit with the code that is the first one;
    - `drain`: exit with code 3 by a second SIGTERM, with code 4 if none follows the first one for as many seconds as
      the argument;
    - `ignore`: ignore SIGTERM;
    - `after`: announce itself once there is the file that the argument names;
    - anything else: end by SIGTERM.
    """
    if action == "exit":
        print(arguments[-1], file=sys.stderr, flush=True)
        sys.exit(int(arguments[0]))
    if action == "leave":
        announce(arguments[-1])
        sys.stderr.write(arguments[-1])
        sys.stderr.flush()
        if os.fork() == 0:
            time.sleep(CHILD_SECONDS)
        sys.exit(7)
    if action == "fail":
        lines = [
            *arguments[:-1],
            "x" * LONG_LINE,
            *(f"line {number} of a long log" for number in range(LINES)),
            arguments[-1],
        ]
        sys.stdout.buffer.write("\n".join(lines).encode().replace(b"\n", b" \xff\n", 1))
        sys.exit(7)
    if action in ("drain", "ignore"):
        drain = partial(_drain, float(arguments[0])) if action == "drain" else signal.SIG_IGN
        signal.signal(signal.SIGTERM, drain)
    while action == "after" and not Path(arguments[0]).exists():
        time.sleep(0.02)
    of_parent = Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace").split("\0")
    here, there = _settings("self"), _settings(os.getppid())
    shown = {
        "arguments": arguments,
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("FD_SUITE")},
        "unlike its parent": sorted(name for name in here if here[name] != there[name]),
        "lacks": sorted({each.partition("=")[0] for each in of_parent} - {"", *os.environ}),
        "devices": [
            one for name in os.environ if name.endswith("VISIBLE_DEVICES") for one in os.environ[name].split(",") if one
        ],
        "cores": sorted(os.sched_getaffinity(0)),
        "pid": os.getpid(),
    }
    announce(json.dumps(shown))
    time.sleep(600)


def _settings(process: int | str) -> dict[str, object]:
    """Return settings that a process has from its parent."""
    folder = Path("/proc", str(process))
    lines = [line.split(":", 1) for line in (folder / "status").read_text().splitlines()]
    status = {name: value for name, value in lines if name in ("Umask", "Groups")}
    nice = (folder / "stat").read_text().rpartition(")")[2].split()[16]
    return {"directory": (folder / "cwd").readlink(), "limits": (folder / "limits").read_text(), "nice": nice, **status}


def _drain(seconds: float, *_: object) -> None:
    signal.signal(signal.SIGTERM, _end)
    time.sleep(seconds)
    sys.exit(4)


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a third one would end an interpreter that shuts down
    sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
