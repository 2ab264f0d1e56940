"""Correct backends of unusual kinds pass the kit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fd_core.hookspecs import ENTRY_POINT_GROUP
from tests.testing.right import plugin

ROOT = Path(__file__).parents[2]
EVERYTHING = bool(int(os.environ.get("FD_WRONG_BACKENDS", "0")))
"""`nox -s kit` runs the whole kit on all variants but the slow one, and its quick part on that."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


SAMPLE = "plain or ((test_lifetime or test_kv) and not right_float16 and not right_blocked_sums)"
"""Packs that only round or add otherwise have the memory and the engines of the oracle."""
QUICK = ("-m", "not fd_thorough and not fd_pairs and not fd_scale")


@pytest.mark.parametrize("names", [[name] for name in plugin.BACKENDS] if EVERYTHING else [[*plugin.BACKENDS]], ids=str)
def test_correct_variants_pass(tmp_path, names):
    info = tmp_path / "fd_right-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-right\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nright = {plugin.__name__}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-c", str(tmp_path / "pytest.ini"), "-p", "no:cacheprovider", "-q"]
    command += ["--basetemp", str(tmp_path / "files"), "--tb=line", "--pyargs", "fd_core.testing.suite"]
    command += [f"--fd-backend={name}" for name in names]
    command += [] if EVERYTHING else ["-k", SAMPLE]
    command += QUICK if not EVERYTHING or "right_slow" in names else ()
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:]
