"""The tests for hardware run on the CPU, so that the first hour on a GPU finds no mistakes in the tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from extent import AT_LENGTH

pytest.importorskip("torch")

FOLDER = Path(__file__).parent
ONLY_THERE = "not synchronises and not two_ranks and not same_bits"
"""Tests that read switches of the device, need two devices, or hold for the kernels alone."""


@AT_LENGTH
def test_hardware_tests_pass_on_the_processor(tmp_path: Path) -> None:
    words = ["-q", "-m", "hardware", "-k", ONLY_THERE, "-p", "kit_on_processor", "-p", "no:cacheprovider"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *words,
        *(str(FOLDER / f"test_{name}.py") for name in ("hardware", "families")),
    ]
    run = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert not re.search(r"\d+ skipped", run.stdout)
