"""The scheduler kit: drives a scheduler and audits every call, see docs/extend/write-a-scheduler.md."""

from typing import Final

from fd_core.testing.models.cases import KitCase, cases_of
from fd_core.testing.schedulers.driver import SchedulerTarget, find_scheduler

__all__ = ["SchedulerCase", "SchedulerTarget", "find_scheduler", "kit_cases"]

QUICK_EXAMPLES: Final = 20
"""Default number of random call sequences, which take some seconds."""


class SchedulerCase(KitCase):
    """A test of the scheduler kit with its parameters."""

    def check(self, target: SchedulerTarget, examples: int = QUICK_EXAMPLES) -> None:
        """Run it. Raises `InvariantViolated` with the rule, or skips the running test, with the reason."""
        target.require(self.section)
        self.run(target=target, examples=examples)


def kit_cases() -> list[SchedulerCase]:
    """Return all cases, section by section."""
    # The suite imports modules of this package.
    from fd_core.testing.schedulers.suite import (
        test_blocks,
        test_budget,
        test_cases,
        test_golden,
        test_lifetime,
        test_pairs,
        test_signals,
        test_storage,
    )

    modules = (test_signals, test_budget, test_blocks, test_golden, test_storage, test_pairs, test_cases, test_lifetime)
    return [SchedulerCase(case.section, case.function, case.parameters) for case in cases_of(modules)]
