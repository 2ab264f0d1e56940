"""The postprocessor kit: token matrices checked against the invariants, see docs/extend/write-a-postprocessor.md."""

from fd_core.testing.models.cases import SuiteCase, cases_of
from fd_core.testing.postprocessors.matrices import PostprocessTarget, find_postprocessor
from fd_core.testing.postprocessors.suite import test_device, test_flight, test_matrix

__all__ = ["PostprocessTarget", "find_postprocessor", "kit_cases"]


def kit_cases() -> list[SuiteCase]:
    """Return all cases, section by section."""
    return list(cases_of((test_matrix, test_flight, test_device)))
