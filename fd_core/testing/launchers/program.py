"""Program launched by the suite: reports its environment and executes commands."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from fd_core.launching.announcing import announce


def main(action: str, *arguments: str) -> None:
    """Print this process's environment, then execute commands; with `fail`, print a line and exit with code 7."""
    if action == "fail":
        print("\n".join(arguments), file=sys.stderr)
        sys.exit(7)
    shown = {
        "arguments": arguments,
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("FD_SUITE")},
        "cores": sorted(os.sched_getaffinity(0)),
        "pid": os.getpid(),
    }
    announce(json.dumps(shown))
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
