"""Cases of all model families as graphs: each computes the logits of numpy, or its model is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fd_core.errors import ConfigError
from fd_core.models.families.installed import installed_families
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.onnx_graph.pack import OnnxOps
from fd_core.testing.models.checkpoints import SIZES, write_config
from tests.ops.onnx_graph.test_models import driver

FAMILIES = {each.model_type: each for each in installed_families().architectures.values()}


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_family_is_computed_as_by_numpy_or_refused(tmp_path: Path, kind: str) -> None:
    family = FAMILIES[kind]
    for case, given in family.cases.items():
        sizes = {family.renamed.get(name, name): value for name, value in SIZES.items()}
        config = {**family.defaults, **sizes, **given, "architectures": [family.architectures[0]], "model_type": kind}
        if config.get("layer_types"):
            config["num_hidden_layers"] = len(config["layer_types"])
        write_config(config, tmp_path / case, seed=3)
        expected = driver(tmp_path / case, NumpyOps())
        try:
            traced = driver(tmp_path / case, OnnxOps())
        except ConfigError as error:
            assert "the onnx pack does not compute" in error.message
            continue
        for work in ([(0, 7)], [(1, 5), (2, 1)], [(0, 1), (1, 6)]):
            expected.step(work)
            traced.step(work)
        for found, row in zip(traced.rows[:3], expected.rows[:3], strict=True):
            np.testing.assert_allclose(np.stack(found.logits), np.stack(row.logits), rtol=1e-3, atol=1e-3)
