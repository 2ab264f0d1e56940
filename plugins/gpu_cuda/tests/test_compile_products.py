"""Products compile for each device and fit its resources; Triton needs no GPU for that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import capabilities, compiled


@pytest.mark.parametrize("capability", capabilities())
def test_products_use_tensor_cores_and_spill_nothing(capability: int, tmp_path: Path) -> None:
    compiled("compile_products.py", tmp_path, str(capability))


@pytest.mark.parametrize("capability", capabilities())
def test_experts_use_tensor_cores_and_spill_nothing(capability: int, tmp_path: Path) -> None:
    compiled("compile_experts.py", tmp_path, str(capability))


def test_nothing_compiles_after_the_first_product_of_any_size(tmp_path: Path) -> None:
    compiled("count_products.py", tmp_path)
