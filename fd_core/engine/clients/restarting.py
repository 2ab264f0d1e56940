"""How often and how fast an engine that died is started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from fd_core.errors import FdError

_log = logging.getLogger(__name__)
_PATIENCE = 5
"""Failed starts in a row that requests wait for; those that come, or still wait, after them are refused."""
_FIRST_SECONDS = 1.0
"""Pause after the first failed start; it doubles with each."""
_LONGEST_SECONDS = 60.0


def pause_after(failures: int) -> float:
    """Return the seconds between a failed start and the next one; `failures` are those in a row."""
    return min(_FIRST_SECONDS * 2.0 ** min(failures - 1, 30), _LONGEST_SECONDS)


async def start_again(
    start: Callable[[], Awaitable[None]], attempts: int, failed: Callable[[], None], refuse: Callable[[str], None]
) -> str | None:
    """Call `start` until it succeeds; return the reason once it raised `FdError` `attempts` times, never if that is 0.

    `failed` is called after each failure, and `refuse` with a reason when requests need no longer wait.
    """
    failures = 0
    while True:
        try:
            await start()
        except FdError as error:
            failures += 1
            failed()
            if failures == attempts:
                _log.error("the engine did not start again: %s", error)
                return f"the engine failed {failures} times to start again; restart the server"
            pause = pause_after(failures)
            _log.error("the engine did not start again; the next attempt is in %g s: %s", pause, error)
            if failures == _PATIENCE:
                refuse(f"the engine failed {failures} times to start again; the server keeps trying")
            await asyncio.sleep(pause)
        else:
            return None
