"""Two calls in two threads, one of which runs as a whole at each line of the other."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
_PATIENCE: Final = 0.2
"""Seconds after which the other call is taken to wait for a lock that the first one holds."""
_MOST_CALLS: Final = 200
_YIELD: Final = dis.opmap["YIELD_VALUE"]


def interleaved(
    first: Callable[[], Result], other: Callable[[], object], package: str, patience: float = _PATIENCE
) -> Result:
    """Return the result of `first`, computed in a thread; `other` runs in a second one before each line of `package`.

    So memory that two instances share is overwritten at any point at which the threads may switch, without luck.
    Raises what either of them raises.
    """
    calls: list[Future[object]] = []
    steps: dict[str, set[tuple[int, int]]] = {}
    with ThreadPoolExecutor(1) as others, ThreadPoolExecutor(1) as own:

        def enter(frame: FrameType, _: str, __: Any) -> Any:
            if frame.f_globals.get("__name__", "").partition(".")[0] != package:
                return None
            return frame.f_trace or followed(-frame.f_code.co_firstlineno)  # a generator goes on

        def followed(line: int) -> Any:
            def switch(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal line
                if event == "line" and len(calls) < _MOST_CALLS and all(call.done() for call in calls[-1:]):
                    calls.append(others.submit(other))
                    with contextlib.suppress(TimeoutError):  # it waits for this thread, and runs later
                        calls[-1].exception(patience)
                code = frame.f_code
                if event == "line" or (event == "return" and code.co_code[frame.f_lasti] != _YIELD):
                    reached = frame.f_lineno if event == "line" else -code.co_firstlineno
                    steps.setdefault(code.co_filename, set()).add((line, reached))
                    line = reached
                return switch

            return switch

        def traced() -> Result:
            before = sys.gettrace()
            sys.settrace(enter)
            try:
                return first()
            finally:
                sys.settrace(before)

        result = own.submit(traced).result()
    for call in calls:
        call.result()
    # Its function for tracing has replaced that of coverage.py, whose numbers for steps between lines it keeps.
    if "coverage" in sys.modules and (measuring := sys.modules["coverage"].Coverage.current()) is not None:
        measuring.get_data().add_arcs(steps)
    return result
