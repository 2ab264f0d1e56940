"""The postprocessor kit: computes token matrices with any postprocessor and compares them with the law.

    @pytest.mark.parametrize("case", kit_cases(), ids=str)
    def test_it_keeps_the_law(case):
        case.run(target=find_postprocessor("mine"))

`fdcore conformance --postprocess NAME` runs the same cases; `docs/extend/write-a-postprocessor.md` shows a whole
plugin.
"""

from fd_core.testing.models.cases import KitCase, cases_of
from fd_core.testing.postprocessors.matrices import PostprocessTarget, find_postprocessor
from fd_core.testing.postprocessors.suite import test_device, test_flight, test_matrix

__all__ = ["PostprocessTarget", "find_postprocessor", "kit_cases"]


def kit_cases() -> list[KitCase]:
    """Return all cases, section by section."""
    return list(cases_of((test_matrix, test_flight, test_device)))
