"""What a suite asks of the thing under test, and why a thing may lack it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

__all__ = ["OPEN", "Requirement", "closed", "lacks", "thorough_but"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """An ability that tests ask for: present, or absent for a reason."""

    reason: str | None = None
    """Why the ability is absent; None if it is present."""

    def require(self) -> None:
        """Skip the running test, with the reason, if the ability is absent."""
        if self.reason is not None:
            lacks(self.reason)


OPEN = Requirement()


def closed(reason: str) -> Requirement:
    """Return a requirement that is not met; `reason` completes "not tested: ..."."""
    return Requirement(reason)


def lacks(reason: str) -> NoReturn:
    """Skip the running test; `reason` completes "not tested: ..."."""
    raise pytest.skip.Exception(f"not tested: {reason}")


def thorough_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return parameters of a test, all but the `quick` ones marked: `-m "not fd_thorough"` leaves those out."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.fd_thorough) for value in values]
