"""Work beside the steps: a thread that compiles yields the processors to those that compute."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

__all__ = ["LARGE_GRAMMAR", "yield_to_all_others", "yield_to_others"]

LARGE_GRAMMAR: Final = 16 * 1024
"""Characters of a grammar that takes so long to compile that it must not take its time from the steps."""


def yield_to_others() -> None:
    """Have the calling thread leave most of a processor to others that want it: for work of milliseconds."""
    _be_nice(5)


def yield_to_all_others() -> None:
    """Have the calling thread run when others do not need its processor: for work of a tenth of a second and more."""
    _be_nice(19)


def _be_nice(niceness: int) -> None:
    # Where the system cannot tell threads apart, nothing changes.
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
