"""Deprecated names: each works for a stated number of versions, and warns once with the name of its replacement.

`docs/extend/public-names.md` has the promise; a test ensures that no name outlives its last version.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

__all__ = ["KEPT_MINOR_VERSIONS", "OLD_NAMES", "OldName", "OldNameWarning", "replaced", "warn_once"]

KEPT_MINOR_VERSIONS: Final = 2
"""An old name works at least in this many minor versions after the one that replaced it."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_told: set[str] = set()


class OldNameWarning(FutureWarning):
    """A name is used that a later version will not have. Python shows it to all users unless it is filtered."""


@dataclass(frozen=True, slots=True)
class OldName:
    """A setting, variable, flag or function that has another name."""

    name: str
    """The old name as users write it: `FD_OLD`, `--old`, `package.function`."""
    instead: str
    """The replacement."""
    since: str
    """The minor version that replaced it, such as `0.1`."""
    until: str
    """The first minor version without it, more than `KEPT_MINOR_VERSIONS` later."""

    def __str__(self) -> str:
        return f"{self.name} was replaced in fd_core {self.since} and is not read from {self.until} on: {self.instead}"


OLD_NAMES: Final[tuple[OldName, ...]] = ()
"""All old names that still work; none at present."""


def warn_once(old: OldName, *, stacklevel: int = 1) -> None:
    """Warn with `OldNameWarning`, once in a process for each name; `stacklevel` 1 blames the caller."""
    if old.name not in _told:
        _told.add(old.name)
        warnings.warn(str(old), OldNameWarning, stacklevel=stacklevel + 1)


def replaced(old: OldName) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a public function that has a successor: it works as before and warns on its first call."""

    def wrap(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def warned(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            warn_once(old, stacklevel=2)
            return function(*args, **kwargs)

        return warned

    return wrap
