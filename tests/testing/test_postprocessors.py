"""The core's postprocessors pass the kit, and each wrong one fails the case that names its fault."""

from functools import cache
from importlib.util import find_spec

import pytest

from fd_core.errors import PluginError
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.torch.ops import TorchOps
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess
from fd_core.testing.kit.law import RULES, InvariantViolated
from fd_core.testing.postprocessors import PostprocessTarget, find_postprocessor, kit_cases
from tests.testing.wrong.postprocessing import WRONG

CASES = {str(case): case for case in kit_cases()}


@cache
def found(name: str) -> PostprocessTarget:
    return find_postprocessor(name)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
@pytest.mark.parametrize("name", ["numpy", "torch", "paddle", "numpy:backend=cpu+onnx"])
def test_core_plugins_pass(name, case):
    needed = "onnxruntime" if "onnx" in name else name
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed; a separate nox session tests it")
    case.run(target=found(name))


def target_of(name: str) -> PostprocessTarget:
    cls = WRONG[name].cls
    return PostprocessTarget(name, cls, TorchOps() if issubclass(cls, TorchPostprocess) else NumpyOps())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_plugin_fails_the_case_that_names_its_fault(name):
    with pytest.raises(InvariantViolated) as caught:
        CASES[WRONG[name].noticed_by].run(target=target_of(name))
    assert caught.value.rule == WRONG[name].rule, caught.value


def test_each_case_is_needed_by_a_wrong_plugin():
    assert len(WRONG) >= 30
    named = {wrong.noticed_by.partition(":")[2].partition("[")[0] for wrong in WRONG.values()}
    assert {case.function.__name__ for case in CASES.values()} == named


def test_every_rule_of_postprocessors_has_a_case():
    assert {"1", "1.1", "1.2", "1.3", "1.9"} <= {rule for case in CASES.values() for rule in case.rules} <= set(RULES)


def test_postprocessor_rejects_an_unsupported_backend():
    with pytest.raises(PluginError, match=r"torch does not support the backend reference \(framework numpy"):
        find_postprocessor("torch:backend=reference")
