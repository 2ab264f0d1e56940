"""The store's troubles behind failures of the client and errors of the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import redis.exceptions as failures
from fd_core.kv.stores.contract import StoreError, Trouble

_LONGEST_TEXT: Final = 200
_SHORTEST_SECRET: Final = 4
"""A shorter secret is not masked: masking would show which letters it has."""

_CLASSES: Final[tuple[tuple[type[Exception], Trouble], ...]] = (
    (failures.AuthenticationError, Trouble.DENIED),
    (failures.AuthenticationWrongNumberOfArgsError, Trouble.DENIED),
    (failures.AuthorizationError, Trouble.DENIED),
    (failures.NoPermissionError, Trouble.DENIED),
    (failures.OutOfMemoryError, Trouble.FULL),
    (failures.ReadOnlyError, Trouble.READ_ONLY),
    (failures.ClusterDownError, Trouble.UNREACHABLE),
    (failures.SlotNotCoveredError, Trouble.UNREACHABLE),
    (failures.ConnectionError, Trouble.UNREACHABLE),
    (failures.TimeoutError, Trouble.TIMEOUT),
    (TimeoutError, Trouble.TIMEOUT),
    (OSError, Trouble.UNREACHABLE),
)
"""Troubles by class of exception; the first that fits counts. `LOADING` is one of redis-py's connection errors."""

# A node of a cluster does not hold the key; only redis-py's cluster client has classes for these in all versions.
_ELSEWHERE: Final = ("MOVED", "ASK", "TRYAGAIN")

_CODES: Final = {
    "CLUSTERDOWN": Trouble.UNREACHABLE,
    "MASTERDOWN": Trouble.UNREACHABLE,
    # Snapshots cannot be written, most often for a full disk: reads go on, writes are refused.
    "MISCONF": Trouble.READ_ONLY,
    "NOREPLICAS": Trouble.READ_ONLY,
    # Protected mode.
    "DENIED": Trouble.DENIED,
    "NOAUTH": Trouble.DENIED,
    # A script holds the server.
    "BUSY": Trouble.TIMEOUT,
}


def store_error(failure: Exception, where: str, password: str | None = None) -> StoreError:
    """Return the error to raise for `failure` of the server `where`, with no `password` in its text."""
    cause: BaseException = failure
    while isinstance(cause, failures.RedisClusterException) and cause.__cause__ is not None:
        cause = cause.__cause__  # what stopped the discovery of a cluster
    text = " ".join(str(cause).split())[:_LONGEST_TEXT] or type(cause).__name__
    if password is not None and len(password) >= _SHORTEST_SECRET:
        text = text.replace(password, "***")
    return StoreError(_trouble(cause), f"{where}: {text}")


@contextmanager
def discovering() -> Iterator[None]:
    """Raise `InvalidResponse` where redis-py stumbles over nonsense from Sentinels or clusters, or over a host name."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise failures.InvalidResponse(f"the answer names no server: {type(error).__name__}") from error


def passes_over(answer: object) -> bool:
    """Whether an answer is an error of one key alone, which then counts as absent."""
    return _code(answer) == "WRONGTYPE"


def is_elsewhere(answer: object) -> bool:
    """Whether a node of a cluster answers that it does not hold the key, or not yet."""
    return isinstance(answer, (failures.AskError, failures.TryAgainError)) or _code(answer) in _ELSEWHERE


def _code(answer: object) -> str:
    return str(answer).partition(" ")[0] if isinstance(answer, failures.ResponseError) else ""


def _trouble(cause: BaseException) -> Trouble:
    for cls, trouble in _CLASSES:
        if isinstance(cause, cls):
            return trouble
    return _CODES.get(_code(cause), Trouble.OTHER)
