"""Work beside the steps: a thread that compiles yields the processors to those that compute."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

__all__ = ["yield_to_others"]

_NICENESS: Final = 5


def yield_to_others() -> None:
    """Have the calling thread run when others do not need its processor, where the system can tell threads apart."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
