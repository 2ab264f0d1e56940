"""Symbolic array: operand of a forward pass while a pack records it."""

from __future__ import annotations

import abc
from typing import Any, NoReturn


class UnknownArray(abc.ABC):
    """Symbol of a result; raises on any use of its values, so that a recording never depends on them."""

    __slots__ = ()

    @abc.abstractmethod
    def _refuse(self, what: str) -> NoReturn:
        """Raise the recorder's error: the forward uses `what` of an array."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"`{name}`")

    def __bool__(self) -> bool:
        self._refuse("the value")

    def __len__(self) -> int:
        self._refuse("the length")

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse("elements")
