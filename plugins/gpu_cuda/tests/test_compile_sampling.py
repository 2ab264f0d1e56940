"""What works on logits compiles for the devices, and its registers hold all values; Triton needs none for that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import compiled


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_sampling_compiles_for_each_device_and_spills_nothing(capability: int, tmp_path: Path) -> None:
    compiled("compile_sampling.py", tmp_path, str(capability))
