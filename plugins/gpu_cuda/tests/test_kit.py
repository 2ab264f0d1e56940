"""The conformance kit on the whole plugin, with the CPU instead of the device and its kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from extent import everything

pytest.importorskip("torch")

NOT_HERE = "not test_a_text_survives_a_crash_in_the_middle and not grow_with_the_block_table"
NOT_HERE += " and not (cost_of_weights and experts)"
"""The engine of the one is a separate process, which has the real device or none. Of what replaces the kernels here,
plain attention reads whole tables, and every expert computes every token."""


AT_SIZE = "unfinished_chunks or decode_batches or last_slot or wide_step or matrix"
"""Tests of production sizes that take the CPU seconds: graphs, padding and state between steps."""

MARKED = "fd_scale or (not fd_pairs and not fd_thorough)"
if everything():
    MARKED, AT_SIZE = "fd_scale or not fd_pairs", f"{AT_SIZE} or memory_is_flat"
else:  # one test of behaviour shared by all backends, and those that depend on this one
    NOT_HERE += " and not (test_budget and not padding) and not zmq"
    # The core's collectives, which its own suite tests; models on ranks remain.
    NOT_HERE += " and not test_sums"
    # A sample of the numbers of drafts and of states; the plain step also has neither adapters nor 8-bit KV.
    NOT_HERE += " and not (test_signals and cuda-0) and not (test_an_abort and not (running or preempted))"
    NOT_HERE += " and not (padding and (cuda-0-2 or cuda-0-3 or cuda-3-1 or cuda-3-4))"
    NOT_HERE += " and not (test_step and not plain)"
    # Nothing compiles or waits for a device here: test_compilations.py and the core's own suite test it.
    NOT_HERE += " and not waits_or_stalls"


def test_processes_import_the_package_next_to_the_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import fd_gpu_cuda; print(fd_gpu_cuda.__file__)"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(run.stdout.strip()).parents[1] == Path(__file__).parents[1]


@pytest.mark.timeout(600)  # 120 s is too little on a busy machine
def test_kit_passes_with_the_processor_as_the_device(tmp_path: Path) -> None:
    chosen = f"(fd_scale and ({AT_SIZE})) or (not fd_scale and {NOT_HERE})"
    words = ["-p", "kit_on_processor", "-p", "no:cacheprovider", "-m", MARKED, "-k", chosen]
    command = [sys.executable, "-m", "pytest", *words, "--pyargs", "fd_core.testing.suite", "--fd-backend=gpu_cuda"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 380
