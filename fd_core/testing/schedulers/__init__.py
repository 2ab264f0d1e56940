"""The scheduler kit: drives any scheduler through the public contract, beside an auditor that knows the law.

    @pytest.mark.parametrize("case", kit_cases(), ids=str)
    def test_it_keeps_the_law(case):
        case.check(find_scheduler("mine"))

`fdcore conformance --scheduler NAME` runs the same cases; `docs/extend/write-a-scheduler.md` shows a whole plugin.
"""

from fd_core.testing.schedulers.cases import SchedulerCase, kit_cases
from fd_core.testing.schedulers.target import SchedulerTarget, find_scheduler

__all__ = ["SchedulerCase", "SchedulerTarget", "find_scheduler", "kit_cases"]
