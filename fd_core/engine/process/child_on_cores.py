"""Starts `child` on some of the processors: `python -m fd_core.engine.process.child_on_cores 0,1`.

Libraries count the processors and start threads as soon as they are imported, so nothing is imported before.
"""

from __future__ import annotations

import os
import sys


def main(cores: str) -> int:
    """Take the processors of these numbers, all if there are none, and serve."""
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    from fd_core.engine.process.child import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
