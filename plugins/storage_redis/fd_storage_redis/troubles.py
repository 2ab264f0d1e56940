"""What a failure of the client or an error of the server means to the core."""

from __future__ import annotations

from typing import Final

import redis.exceptions as failures
from fd_core.kv.stores.contract import StoreError, Trouble

__all__ = ["passes_over", "store_error"]

_LONGEST_TEXT: Final = 200

_CLASSES: Final[tuple[tuple[type[Exception], Trouble], ...]] = (
    (failures.AuthenticationError, Trouble.DENIED),
    (failures.AuthenticationWrongNumberOfArgsError, Trouble.DENIED),
    (failures.AuthorizationError, Trouble.DENIED),
    (failures.NoPermissionError, Trouble.DENIED),
    (failures.OutOfMemoryError, Trouble.FULL),
    (failures.ReadOnlyError, Trouble.READ_ONLY),
    (failures.ClusterDownError, Trouble.UNREACHABLE),
    (failures.AskError, Trouble.UNREACHABLE),
    (failures.TryAgainError, Trouble.UNREACHABLE),
    (failures.SlotNotCoveredError, Trouble.UNREACHABLE),
    (failures.ConnectionError, Trouble.UNREACHABLE),
    (failures.TimeoutError, Trouble.TIMEOUT),
    (TimeoutError, Trouble.TIMEOUT),
    (OSError, Trouble.UNREACHABLE),
)
"""The first that fits counts; `LOADING` is one of redis-py's connection errors."""

_CODES: Final = {
    "WRONGTYPE": Trouble.MALFORMED,
    # Snapshots cannot be written, most often for a full disk: reads go on, writes are refused.
    "MISCONF": Trouble.READ_ONLY,
    "NOREPLICAS": Trouble.READ_ONLY,
    # Protected mode.
    "DENIED": Trouble.DENIED,
    "NOAUTH": Trouble.DENIED,
    # A script holds the server.
    "BUSY": Trouble.TIMEOUT,
}


def store_error(failure: Exception, where: str, secrets: tuple[str, ...] = ()) -> StoreError:
    """Return the error to raise for `failure` of the server `where`, with none of `secrets` in its text."""
    cause: BaseException = failure
    while isinstance(cause, failures.RedisClusterException) and cause.__cause__ is not None:
        cause = cause.__cause__  # what stopped the discovery of a cluster
    text = " ".join(str(cause).split())[:_LONGEST_TEXT] or type(cause).__name__
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return StoreError(_trouble(cause), f"{where}: {text}")


def passes_over(answer: object) -> bool:
    """Whether an answer concerns one key alone: the key is as good as absent and others are not touched by it."""
    if isinstance(answer, (failures.AskError, failures.TryAgainError)):
        return True
    return isinstance(answer, failures.ResponseError) and str(answer).startswith("WRONGTYPE")


def _trouble(cause: BaseException) -> Trouble:
    for cls, trouble in _CLASSES:
        if isinstance(cause, cls):
            return trouble
    if isinstance(cause, failures.ResponseError):
        return _CODES.get(str(cause).partition(" ")[0], Trouble.OTHER)
    return Trouble.OTHER
