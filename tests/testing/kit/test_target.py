"""Descriptions of backends under test."""

import pytest

from fd_core.testing.kit.target import parse_target


def test_description_names_the_kernels_that_compute(tmp_path):
    pytest.importorskip("torch")
    assert "torch eager" in parse_target("cpu:native_kernels=false", tmp_path).about()["device"]
