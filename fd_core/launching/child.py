"""Runs a launched process: `python -P -m fd_core.launching.child CORES -m MODULE ARGUMENTS...`.

It ends when standard input closes, for then nobody watches over it any more. CORES are numbers of processors, such as
`0,1`; empty means all. Libraries count the processors as soon as they are imported, so nothing is imported before.
"""

from __future__ import annotations

import os
import runpy
import sys

from fd_core.launching.announcing import open_channel
from fd_core.launching.parent_watch import end_with_parent


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
