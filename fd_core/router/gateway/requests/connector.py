"""Connections to workers: kept open between requests, and never used again once the worker has closed them."""

from __future__ import annotations

import errno
import select
from types import SimpleNamespace
from typing import Any, Final

import aiohttp

_RESETS: Final = frozenset({errno.ECONNRESET, errno.EPIPE})


class WorkerConnector(aiohttp.TCPConnector):
    """Leaves out pooled connections that the worker has closed before the event loop noticed it."""

    async def _get(self, key: Any, traces: Any) -> Any:
        while (connection := await super()._get(key, traces)) is not None:
            if not _readable(connection.transport):
                return connection
            connection.close()
        return None


def _readable(transport: Any) -> bool:
    """Return True for an idle connection that has something to read: its end, as no answer is due."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or (number := sock.fileno()) < 0:
        return True
    poll = select.poll()
    poll.register(number, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(0))


def reuse_tracing() -> aiohttp.TraceConfig:
    """Return tracing that sets `reused` of a request's `trace_request_ctx` if it went over a pooled connection."""

    async def reused(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        asked = context.trace_request_ctx
        if asked is not None:
            asked.reused = True

    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(reused)
    return tracing


def was_stale(error: BaseException, asked: SimpleNamespace) -> bool:
    """Return True if a request failed because the worker had closed a pooled connection before it read the request.

    A system resets a connection whose program closed it with something unread. A worker that read the whole request
    and is lost then ends the connection without a reset, so no request that may have begun is sent again.
    """
    return asked.reused and isinstance(error, aiohttp.ClientOSError) and error.errno in _RESETS
