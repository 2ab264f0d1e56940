"""LoRA kernels compile for each device, read 16 bytes at a time and hardly spill; Triton needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import capabilities, compiled


@pytest.mark.parametrize("capability", capabilities())
def test_adapters_compile_for_each_device(capability: int, tmp_path: Path) -> None:
    compiled("compile_lora.py", tmp_path, str(capability))
