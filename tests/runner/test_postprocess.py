"""The runner writes token matrices with the postprocessor that fits its backend."""

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
def test_a_later_step_leaves_an_earlier_matrix_alone():
    matrices, rng = Matrices(PostprocessTarget("numpy", NumpyPostprocess, NumpyOps()), 5, 2), np.random.default_rng(1)
    steps = [random_rows(rng, 5, 2, rows, 5 - rows) for rows in (3, 2, 0, 5, 3)]
    for matrix, rows in [(matrices.begin(rows), rows) for rows in steps]:
        matrices.compare_later(matrix, rows)


class ForTwo(NumpyPostprocess):
    serves = ("mychip", "numpy")


class ForNobody(NumpyPostprocess):
    serves = "numpy"


@pytest.mark.parametrize(
    ("framework", "backend", "fits"), [("numpy", "reference", True), ("torch", "mychip", True), ("torch", "cpu", False)]
)
def test_a_postprocessor_is_for_frameworks_or_for_backends(framework, backend, fits):
    if fits:
        require_fit(ForTwo, "two", framework, backend)
        return
    with pytest.raises(PluginError, match=r"two does not support the backend cpu \(framework torch"):
        require_fit(ForTwo, "two", framework, backend)


@pytest.mark.parametrize("cls", [ForNobody, Postprocess])
def test_who_does_not_say_properly_what_it_serves_serves_nobody(cls):
    with pytest.raises(PluginError, match="it supports"):
        require_fit(cls, "nobody", "num", "numpy")


def test_an_engine_refuses_a_postprocessor_for_another_framework():
    with pytest.raises(PluginError, match="torch does not support the backend null") as refused:
        null_engine(postprocess="torch")
    assert refused.value.exit_code == 4


@pytest.mark.parametrize("asked", [None, "numpy"])
def test_the_summary_mentions_another_than_the_default(asked):
    engine = null_engine(postprocess=asked)
    engine.close()
    assert engine.info.postprocess is None
    assert "Postprocess" not in dict(summary(engine.info, ServerConfig(), ""))
    another = msgspec.structs.replace(engine.info, postprocess="lookup")
    assert dict(summary(another, ServerConfig(), ""))["Postprocess"] == "lookup"
