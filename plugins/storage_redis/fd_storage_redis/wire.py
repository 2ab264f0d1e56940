"""Batches of commands on one connection: sent without joining their parts, answered in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from fd_core.kv.stores.contract import Bytes
from redis.connection import ConnectionPool
from redis.exceptions import AuthenticationError, AuthorizationError, BusyLoadingError, ConnectionError, ResponseError

from fd_storage_redis.deadline import remaining
from fd_storage_redis.troubles import discovering

Argument: TypeAlias = bytes | Sequence[Bytes]
"""One argument, whole or in parts."""
Command: TypeAlias = Sequence[Argument]

_SMALL: Final = 8 << 10
"""Parts up to this many bytes are joined with their neighbours: a system call costs more than copying them."""


def packed(commands: Iterable[Command]) -> list[Bytes]:
    """Return the buffers of `commands` in the Redis protocol; large parts are among them without a copy."""
    buffers: list[Bytes] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            parts = [memoryview(part) for part in ((argument,) if isinstance(argument, bytes) else argument)]
            small += b"$%d\r\n" % sum(part.nbytes for part in parts)
            for part in parts:
                if part.nbytes <= _SMALL:
                    small += part
                else:
                    buffers += [small, part]
                    small = bytearray()
            small += b"\r\n"
    return [*buffers, small]


def exchange(pool: ConnectionPool, commands: Sequence[Command]) -> list[Any]:
    """Return the answer to each command; an error that the server answers is returned, not raised.

    A connection that breaks is replaced once: every command of a store can be repeated. Raises redis-py's errors; after
    one, the connection is closed, so that no late answer can be taken for another's.
    """
    try:
        return _attempt(pool, commands)
    except (AuthenticationError, AuthorizationError, BusyLoadingError):
        raise
    except ConnectionError:
        remaining()
        return _attempt(pool, commands)


def _attempt(pool: ConnectionPool, commands: Sequence[Command]) -> list[Any]:
    # The pool checks a connection and replaces one that the server closed meanwhile; Sentinels are asked here too.
    with discovering():
        connection = pool.get_connection()
    try:
        connection.send_packed_command(packed(commands))
        return [_answer(connection) for _ in commands]
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response(disconnect_on_error=True)
    except ResponseError as refusal:
        return refusal
