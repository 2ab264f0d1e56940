"""The scheduler kit: drives a scheduler and audits every call, see docs/extend/write-a-scheduler.md."""

from fd_core.testing.models.cases import SuiteCase, cases_of
from fd_core.testing.schedulers.driver import SchedulerTarget, find_scheduler

__all__ = ["SchedulerCase", "SchedulerTarget", "find_scheduler", "kit_cases"]


class SchedulerCase(SuiteCase):
    """A test of the scheduler kit with its parameters."""

    def check(self, target: SchedulerTarget) -> None:
        """Run it. Raises `InvariantViolated` with the rule, or skips the running test, with the reason."""
        target.require(self.section)
        self.run(target=target)


def kit_cases() -> list[SchedulerCase]:
    """Return all cases, section by section."""
    # The suite imports modules of this package.
    from fd_core.testing.schedulers.suite import (
        test_blocks,
        test_budget,
        test_cases,
        test_day,
        test_lifetime,
        test_pairs,
        test_signals,
        test_storage,
    )

    modules = (test_signals, test_budget, test_blocks, test_storage, test_pairs, test_cases, test_lifetime, test_day)
    return [SchedulerCase(case.section, case.function, case.parameters) for case in cases_of(modules)]
