"""Nothing compiles while requests are served. Triton really runs, in a process of its own with a driver that launches
nothing; see `fake_driver`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


def answer(script: str, *words: str, cache: Path) -> Any:
    """Run a script beside this one without the interpreter, and return what it prints last."""
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(here / script), *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_the_driver_counts_what_triton_would_compile_and_launches_nothing(tmp_path: Path) -> None:
    found, failures, launches, touched = answer("count_small_kernels.py", cache=tmp_path)
    # A count of 1 is a constant, multiples of 16 and addresses that are none are known to the compiler.
    assert found == {"_special": [1, 1, 1, 0, 1, 1], "_plain": [1, 0, 0, 0, 0, 1]}
    assert (failures, launches, touched) == ([], 12, 0.0)
