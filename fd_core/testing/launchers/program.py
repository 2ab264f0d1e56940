"""Program launched by the suite: reports its environment and executes commands."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from fd_core.launching.announcing import announce


def main(action: str, *arguments: str) -> None:
    """Print this process's environment, then run until it is ended; the action is

    - `fail`: print the arguments as lines, the first one with a byte that is not UTF-8, the last one after 3,000
      others and without an end of its line, and exit with code 7;
    - `exit`: print the last argument, and exit with code 7;
    - `drain`: exit with code 3 by a second SIGTERM, with code 4 if none follows the first one for 5 seconds;
    - `ignore`: ignore SIGTERM;
    - anything else: end by SIGTERM.
    """
    if action == "exit":
        print(arguments[-1])
        sys.exit(7)
    if action == "fail":
        lines = [*arguments[:-1], *(f"line {number} of a long log" for number in range(3000)), arguments[-1]]
        sys.stdout.buffer.write("\n".join(lines).encode().replace(b"\n", b" \xff\n", 1))
        sys.exit(7)
    if action in ("drain", "ignore"):
        signal.signal(signal.SIGTERM, _drain if action == "drain" else signal.SIG_IGN)
    shown = {
        "arguments": arguments,
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("FD_SUITE")},
        "cores": sorted(os.sched_getaffinity(0)),
        "pid": os.getpid(),
    }
    announce(json.dumps(shown))
    time.sleep(600)


def _drain(*_: object) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    time.sleep(5)
    sys.exit(4)


if __name__ == "__main__":
    main(*sys.argv[1:])
