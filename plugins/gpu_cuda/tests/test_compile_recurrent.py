"""The kernels of recurrent layers compile for the devices, and spill nothing; Triton needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import capabilities, compiled


@pytest.mark.parametrize("capability", capabilities())
def test_recurrent_layers_compile_for_each_device(capability: int, tmp_path: Path) -> None:
    compiled("compile_recurrent.py", tmp_path, str(capability))
