"""The way to a store's values past the store, so that a broken put cannot hide behind a broken get."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager

from fd_core.kv.stores.contract import Trouble
from fd_core.testing.kit.requirements import lacks


class BackDoor(abc.ABC):
    """Reads and writes where the store keeps its values, with means of its own.

    The methods that are not abstract are switches. A store whose back door does not override one skips the tests that
    need it; override it with `lacks("...")` to give a better reason.
    """

    @abc.abstractmethod
    def read(self, key: bytes) -> bytes | None:
        """Return the value under `key`, None if there is none."""

    @abc.abstractmethod
    def write(self, key: bytes, value: bytes) -> None:
        """Put `value` under `key`, as somebody else would."""

    @abc.abstractmethod
    def delete(self, key: bytes) -> None:
        """Remove the value under `key`, if there is one."""

    def spoil(self, key: bytes) -> None:
        """Put something under `key` that is not a value, such as another type or a folder."""
        lacks(f"{type(self).__name__} cannot put anything but values under a key")

    def restart(self) -> None:
        """Kill whatever holds the values and start it again."""
        lacks(f"{type(self).__name__} has nothing to restart")

    def fault(self, trouble: Trouble) -> AbstractContextManager[object]:
        """Return a context manager: the store has the trouble inside it and is well again afterwards."""
        lacks(f"{type(self).__name__} cannot make a store {trouble}")
