"""The core's postprocessors pass the kit, and each wrong one fails the case that names its fault."""

import threading
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest

from fd_core.errors import PluginError
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.torch.ops import TorchOps
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess
from fd_core.testing.axes.parts import cases_of
from fd_core.testing.hooks.purity import unchanged_process
from fd_core.testing.kit.growth import one_torch_thread
from fd_core.testing.kit.law import RULES
from fd_core.testing.models import cases as suite_cases
from fd_core.testing.postprocessors import PostprocessTarget, find_postprocessor, kit_cases
from fd_core.testing.postprocessors.steps import MATRICES
from fd_core.testing.postprocessors.suite import test_device as device
from fd_core.testing.postprocessors.suite import test_flight as flight
from fd_core.testing.postprocessors.suite.test_matrix import test_matrix as over_cases
from tests.testing.witnesses import check_of
from tests.testing.wrong.postprocessing import WRONG

CASES = {str(case): case for case in kit_cases() if case.function is not over_cases}
MATRIX, QUICK = cases_of(MATRICES)


@cache
def found(name: str) -> PostprocessTarget:
    return find_postprocessor(name)


@pytest.mark.parametrize(
    "case",
    [
        # The other day is like it; a wrong plugin fails in this one.
        pytest.param(
            case, id=name, marks=pytest.mark.soak if name == "flight:test_an_ordinary_day_of_a_server[large]" else ()
        )
        for name, case in CASES.items()
    ],
)
@pytest.mark.parametrize("name", ["numpy", "torch", "paddle", "numpy:backend=cpu+onnx"])
def test_core_plugins_pass(name, case):
    needed = "onnxruntime" if "onnx" in name else name
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed; a separate nox session tests it")
    case.run(target=found(name))


def target_of(name: str) -> PostprocessTarget:
    cls = WRONG[name].cls
    others = (PostprocessTarget(name, cls, TorchOps()),) if len(cls.serves) > 1 else ()
    return PostprocessTarget(name, cls, TorchOps() if issubclass(cls, TorchPostprocess) else NumpyOps(), others=others)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_core_plugins_pass_the_quick_cases(name):
    for case in MATRIX[:QUICK]:
        case.check(found(name), "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_numpy_passes_some_cases_of_few_steps():
    for case in MATRIX[QUICK::12]:
        if case.values["steps"] < 1000:
            case.check(found("numpy"), "")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["numpy", "torch", "paddle", "numpy:backend=cpu+onnx"])
def test_core_plugins_pass_every_case(name):
    target = found(name)
    for case in MATRIX:
        case.check(target, "")


@pytest.mark.in_turn(8, by=lambda name: check_of(WRONG[name].noticed_by))
@pytest.mark.parametrize("name", WRONG)
def test_wrong_plugin_fails_the_case_that_names_its_fault(name):
    wrong, target = WRONG[name], target_of(name)
    with pytest.raises(AssertionError, match=f"law {wrong.rule}: "):
        if wrong.noticed_by in CASES:
            CASES[wrong.noticed_by].run(target=target)
        _, _, text = wrong.noticed_by.partition(":")
        for case in [MATRICES.case(text)] if text else MATRIX:
            over_cases(target, case)


def test_import_that_sets_threads_is_noticed():
    with one_torch_thread():
        from tests.testing.wrong.importing import SetsThreads

        with pytest.raises(AssertionError, match="law 8: it changes the number of threads of torch"):
            CASES["flight:test_threads_are_left_to_the_backend"].run(
                target=PostprocessTarget("threads", SetsThreads, TorchOps())
            )


def test_each_case_is_needed_by_a_wrong_plugin():
    named = {wrong.noticed_by.partition(":")[2].partition("[")[0] for wrong in WRONG.values()}
    assert {case.function.__name__ for case in CASES.values()} <= named


def test_scratch_memory_under_a_lock_passes():
    lock, scratch = threading.Lock(), np.empty((2**16, 17), np.int32)

    class Locked(NumpyPostprocess):
        def token_matrix(self, sampled, accepted, slots, revoked):
            with lock:
                part = scratch[: self.limits.max_num_seqs, : sampled.shape[1]]
                part[:] = super().token_matrix(sampled, accepted, slots, revoked)
                return part.copy()

    for case in MATRIX[:QUICK]:
        case.check(PostprocessTarget("locked", Locked, NumpyOps()), "")


def test_right_plugin_for_two_frameworks_passes_as_within_the_suite(monkeypatch):
    """The suite checks the process around each test, and around each case within it, of which days take long."""
    short = [case for case in suite_cases.cases_of((device, flight)) if "day" not in str(case)]
    monkeypatch.setattr(suite_cases, "cases_of", lambda _: short)

    class Both(NumpyPostprocess):
        serves = ("numpy", "torch")

        def token_matrix(self, *given):
            right = NumpyPostprocess if self.ops.framework == "numpy" else TorchPostprocess
            return right.token_matrix(self, *given)

    others = (PostprocessTarget("both", Both, TorchOps()),)
    with unchanged_process():
        CASES["matrix:test_matrix_on_each_framework_that_it_serves"].run(
            target=PostprocessTarget("both", Both, NumpyOps(), others=others)
        )


def test_every_rule_of_postprocessors_has_a_case():
    assert {"1", "1.1", "1.2", "1.3", "1.9"} <= {rule for case in kit_cases() for rule in case.rules} <= set(RULES)


def test_postprocessor_rejects_an_unsupported_backend():
    with pytest.raises(PluginError, match=r"torch does not support the backend reference \(framework numpy"):
        find_postprocessor("torch:backend=reference")
