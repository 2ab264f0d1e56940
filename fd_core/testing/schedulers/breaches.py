"""How a kit says that a rule of the law was broken."""

from __future__ import annotations

from typing import NoReturn

from fd_core.testing.kit.law import RULES


class LawBroken(AssertionError):
    """What is tested broke a rule."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"law {rule}: {what}")
        self.rule = rule


def broken(rule: str, what: str) -> NoReturn:
    """Fail the running test: `what` was seen, against `rule`."""
    assert rule in RULES
    raise LawBroken(rule, what)


def require(condition: object, rule: str, what: str) -> None:
    """Fail the running test unless `condition` holds."""
    if not condition:
        broken(rule, what)
