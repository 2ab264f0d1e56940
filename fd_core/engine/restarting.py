"""How often and how fast an engine that died is started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from fd_core.errors import FdError

__all__ = ["GAVE_UP", "start_again"]

_log = logging.getLogger(__name__)
_MAX_RESTARTS = 5
"""Engines that die this often in a row without ever becoming ready are not started again."""
_RESTART_SECONDS = 1.0
"""Pause after the first failed start; it doubles with each."""
GAVE_UP = f"the engine failed {_MAX_RESTARTS} times to start again; restart the server"


async def start_again(start: Callable[[], Awaitable[None]]) -> bool:
    """Call `start` until it succeeds; return False once it raised `FdError` as often as is tried."""
    for attempt in range(_MAX_RESTARTS):
        try:
            await start()
        except FdError as error:
            _log.error("the engine did not start again: %s", error)
            if attempt + 1 < _MAX_RESTARTS:
                await asyncio.sleep(_RESTART_SECONDS * 2**attempt)
        else:
            return True
    return False
