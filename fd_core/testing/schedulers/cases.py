"""The cases of the scheduler kit as values, for a test suite of one's own."""

from __future__ import annotations

from typing import Final

from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.cases import KitCase, cases_of
from fd_core.testing.schedulers.suite import (
    test_blocks,
    test_budget,
    test_golden,
    test_pairs,
    test_signals,
    test_storage,
)
from fd_core.testing.schedulers.target import SchedulerTarget

QUICK_EXAMPLES: Final = 20
"""Random sequences of calls that take some seconds."""


class SchedulerCase(KitCase):
    """A test of the scheduler kit with its parameters."""

    def check(self, target: SchedulerTarget, examples: int = QUICK_EXAMPLES) -> None:
        """Run it. Raises `LawBroken` with the rule, or skips the running test, with the reason."""
        if self.section in target.lacks:
            lacks(target.lacks[self.section])
        self.run(target=target, examples=examples)


def kit_cases() -> list[SchedulerCase]:
    """Return all cases, section by section."""
    modules = (test_signals, test_budget, test_blocks, test_golden, test_storage, test_pairs)
    return [SchedulerCase(case.section, case.function, case.parameters) for case in cases_of(modules)]
