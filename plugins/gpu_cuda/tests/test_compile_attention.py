"""Attention compiles for each device and fits its resources; Triton needs no GPU for that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import capabilities, compiled


@pytest.mark.parametrize("capability", capabilities())
def test_attention_uses_tensor_cores_and_fits_each_device(capability: int, tmp_path: Path) -> None:
    compiled("compile_attention.py", tmp_path, str(capability))
