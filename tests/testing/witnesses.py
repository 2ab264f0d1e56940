"""Wrong plugins, and the check that each is a witness of: the default run has one of each, see the mark `in_turn`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Witness:
    """A wrong plugin, the rule that it breaks, and the test, the case or the part of a kit that detects it."""

    cls: type[Any]
    rule: str
    noticed_by: str


class Witnesses(dict[str, Witness]):
    """Wrong plugins of one kind, by the names of their classes."""

    def breaks(self, rule: str, noticed_by: str) -> Callable[[type], type]:
        """Return a decorator that adds a class."""

        def register(cls: type) -> type:
            self[cls.__name__] = Witness(cls, rule, noticed_by)
            return cls

        return register


def check_of(noticed_by: str) -> str:
    """Return the name of a test, or the part and the first axis of a case, without the values that show a fault."""
    return re.split(r"[\[=]", noticed_by)[0]
