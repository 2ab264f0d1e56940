"""Kernels on logits compile for each device without spilling registers; Triton needs no GPU for that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import capabilities, compiled
from test_compilations import answer


@pytest.mark.parametrize("capability", capabilities())
def test_sampling_compiles_without_spills_for_each_device(capability: int, tmp_path: Path) -> None:
    compiled("compile_sampling.py", tmp_path, str(capability))


def test_kernels_of_one_step_are_reused_for_all_sizes(tmp_path: Path) -> None:
    found = answer("count_sampling.py", cache=tmp_path)
    assert len(found["first"]) == 13
    assert found["later"] == []
