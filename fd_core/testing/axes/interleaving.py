"""Two calls in two threads, one of which runs as a whole at each line of the other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
_PATIENCE: Final = 0.2
"""Seconds after which the other call is taken to wait for a lock that the first one holds."""
_MOST_CALLS: Final = 200


def interleaved(
    first: Callable[[], Result], other: Callable[[], object], package: str, patience: float = _PATIENCE
) -> Result:
    """Return the result of `first`, computed in a thread; `other` runs in a second one before each line of `package`.

    So memory that two instances share is overwritten at any point at which the threads may switch, without luck.
    Raises what either of them raises.
    """
    calls: list[Future[object]] = []
    with ThreadPoolExecutor(1) as others, ThreadPoolExecutor(1) as own:

        def switch(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_globals.get("__name__", "").partition(".")[0] != package:
                return None
            if event == "line" and len(calls) < _MOST_CALLS and all(call.done() for call in calls[-1:]):
                calls.append(others.submit(other))
                with contextlib.suppress(TimeoutError):  # it waits for this thread, and runs later
                    calls[-1].exception(patience)
            return switch

        def traced() -> Result:
            before = sys.gettrace()
            sys.settrace(switch)
            try:
                return first()
            finally:
                sys.settrace(before)

        result = own.submit(traced).result()
    for call in calls:
        call.result()
    return result
