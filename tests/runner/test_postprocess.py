"""The runner writes token matrices with the postprocessor for its backend."""

import msgspec
import numpy as np
import pytest

from fd_core.cli.serving.summary import summary
from fd_core.config import ServerConfig
from fd_core.errors import PluginError
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.postprocess.contract import Postprocess, require_fit
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.testing.postprocessors import PostprocessTarget
from fd_core.testing.postprocessors.matrices import Matrices, random_rows
from tests.engine.helpers import null_engine


@pytest.mark.law("1")
def test_later_step_does_not_modify_earlier_matrix():
    matrices, rng = Matrices(PostprocessTarget("numpy", NumpyPostprocess, NumpyOps()), 5, 2), np.random.default_rng(1)
    steps = [random_rows(rng, 5, 2, rows, 5 - rows) for rows in (3, 2, 0, 5, 3)]
    for matrix, rows in [(matrices.begin(rows), rows) for rows in steps]:
        matrices.compare(matrix, rows)


class ForTwo(NumpyPostprocess):
    serves = ("mychip", "numpy")


class ForNothing(NumpyPostprocess):
    serves = "numpy"


@pytest.mark.parametrize(
    ("framework", "backend", "fits"), [("numpy", "reference", True), ("torch", "mychip", True), ("torch", "cpu", False)]
)
def test_postprocessor_targets_frameworks_or_backends(framework, backend, fits):
    if fits:
        require_fit(ForTwo, "two", framework, backend)
        return
    with pytest.raises(PluginError, match=r"two does not support the backend cpu \(framework torch"):
        require_fit(ForTwo, "two", framework, backend)


@pytest.mark.parametrize("cls", [ForNothing, Postprocess])
def test_postprocessor_with_invalid_target_is_rejected(cls):
    with pytest.raises(PluginError, match="it supports"):
        require_fit(cls, "unused", "num", "numpy")


def test_postprocessor_for_other_framework_is_rejected():
    with pytest.raises(PluginError, match="torch does not support the backend null") as refused:
        null_engine(postprocess="torch")
    assert refused.value.exit_code == 4


@pytest.mark.parametrize("name", [None, "numpy"])
def test_summary_names_non_default_postprocessor(name):
    engine = null_engine(postprocess=name)
    engine.close()
    assert engine.info.postprocess is None
    assert "Postprocess" not in dict(summary(engine.info, ServerConfig(), ""))
    another = msgspec.structs.replace(engine.info, postprocess="lookup")
    assert dict(summary(another, ServerConfig(), ""))["Postprocess"] == "lookup"
