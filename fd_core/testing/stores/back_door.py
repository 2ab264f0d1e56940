"""The way to a store's values past the store, so that a broken put cannot hide behind a broken get."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager

from fd_core.kv.stores.contract import Trouble
from fd_core.testing.requirements import lacks

__all__ = ["BackDoor"]


class BackDoor(abc.ABC):
    """Reads and writes where the store keeps its values, with means of its own.

    The methods that are not abstract are switches. A store whose back door does not override one skips the tests that
    need it; override it with `lacks("...")` to give a better reason.
    """

    @abc.abstractmethod
    def read(self, key: bytes) -> bytes | None:
        """Return what lies under `key`, None if nothing does."""

    @abc.abstractmethod
    def write(self, key: bytes, value: bytes) -> None:
        """Put `value` under `key`, as somebody else would."""

    @abc.abstractmethod
    def delete(self, key: bytes) -> None:
        """Take away what lies under `key`, if anything does."""

    def spoil(self, key: bytes) -> None:
        """Put something under `key` that is no value at all, such as another type or a folder."""
        lacks(f"{type(self).__name__} cannot put anything but values under a key")

    def restart(self) -> None:
        """End whatever holds the values, without warning, and start it again."""
        lacks(f"{type(self).__name__} has nothing to restart")

    def fault(self, trouble: Trouble) -> AbstractContextManager[object]:
        """Return a context inside which the store has that trouble and after which it has not."""
        lacks(f"{type(self).__name__} cannot make a store {trouble}")
