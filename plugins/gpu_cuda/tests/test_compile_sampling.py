"""What works on logits compiles for the devices, and its registers hold all values; Triton needs none for that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from compiling import capabilities, compiled
from test_compilations import answer


@pytest.mark.parametrize("capability", capabilities())
def test_sampling_compiles_for_each_device_and_spills_nothing(capability: int, tmp_path: Path) -> None:
    compiled("compile_sampling.py", tmp_path, str(capability))


def test_what_was_compiled_for_one_step_serves_steps_of_all_sizes(tmp_path: Path) -> None:
    found = answer("count_sampling.py", cache=tmp_path)
    assert len(found["first"]) == 13
    assert found["later"] == []
