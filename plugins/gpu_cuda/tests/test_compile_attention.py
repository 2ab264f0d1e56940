"""Attention compiles for the devices, and what it compiles to fits them; Triton needs none for that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import capabilities, compiled


@pytest.mark.parametrize("capability", capabilities())
def test_attention_takes_the_tensor_cores_and_the_memory_that_each_device_has(capability: int, tmp_path: Path) -> None:
    compiled("compile_attention.py", tmp_path, str(capability))
