"""Matrix: the row of each slot, protocol 1."""

from __future__ import annotations

import pytest

from fd_core.config.envelope import OperatingEnvelope
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models import cases as suite_cases
from fd_core.testing.postprocessors.matrices import PostprocessTarget
from fd_core.testing.postprocessors.steps import MATRICES
from fd_core.testing.postprocessors.suite import test_device as device
from fd_core.testing.postprocessors.suite import test_flight as flight


@pytest.mark.law("1", "1.1", "1.2", "1.3", "1.9", "8")
@pytest.mark.fd_cases(MATRICES)
def test_matrix(target: PostprocessTarget, case: KitCase) -> None:
    envelope = getattr(target.make, "envelope", OperatingEnvelope())
    if beyond := envelope.exceeded(MATRICES.sizes(case.values)):
        lacks(f"its envelope has {beyond}")
    case.check(target, f"fdcore conformance --postprocess {target.name}")
    for other in target.others:
        if isinstance(other, PostprocessTarget):
            case.check(other, f"fdcore conformance --postprocess {other.name}:backend={other.ops.framework}")


@pytest.mark.law("1", "8")
def test_matrix_on_each_framework_that_it_serves(target: PostprocessTarget) -> None:
    """Check those of devices and flight on the frameworks other than the first one."""
    missing = [other for other in target.others if isinstance(other, str)]
    for other in target.others:
        if isinstance(other, PostprocessTarget):
            for test in suite_cases.cases_of((device, flight)):
                try:
                    test.run(target=other)
                except pytest.skip.Exception as skipped:
                    missing.append(f"{other.ops.framework}, where {test} is not possible: {skipped}")
                except AssertionError as error:
                    raise AssertionError(f"{test} on {other.ops.framework}: {error}") from error
    if missing:
        lacks(f"it also serves {'; '.join(missing)}")
