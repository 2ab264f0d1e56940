"""Products compile for the devices, and what they compile to fits them; Triton needs none for that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import compiled


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_products_take_the_tensor_cores_of_each_device_and_spill_nothing(capability: int, tmp_path: Path) -> None:
    compiled("compile_products.py", tmp_path, str(capability))
