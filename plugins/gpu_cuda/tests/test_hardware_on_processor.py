"""The tests for hardware, with the processor in its place: so that the first hour finds no mistake in the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from extent import AT_LENGTH

pytest.importorskip("torch")

FOLDER = Path(__file__).parent
ONLY_THERE = "not synchronises and not two_ranks and not same_bits"
"""What looks at the device's own switches, needs two of them, or holds for the kernels alone."""


@AT_LENGTH
def test_the_tests_for_hardware_pass_with_the_processor_in_its_place(tmp_path: Path) -> None:
    words = ["-q", "-m", "hardware", "-k", ONLY_THERE, "-p", "kit_on_processor", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *words, str(FOLDER / "test_hardware.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(command, env=environment, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert not re.search(r"\d+ skipped", run.stdout)
