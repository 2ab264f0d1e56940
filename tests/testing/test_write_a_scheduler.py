"""The scheduler that the document writes passes the kit and serves, found as a user's would be."""

import os
import subprocess
import sys

import pytest

from tests.testing.documents import ROOT, run_document

pytestmark = pytest.mark.slow

SERVES = """
import sys
from pathlib import Path

from fd_core.testing.golden import Golden
from fd_core.testing.target import parse_target
from fd_core.testing.texts import greedy, run

target = parse_target("reference", Path(sys.argv[1]))
golden = Golden(target)
specs = [greedy(f"r{number}", range(number, number + 6), 40) for number in range(5)]
with target.engine(3, golden.whole(specs), 0.3, pipeline_depth=2, scheduler="batches") as engine:
    golden.check(specs, run(engine, specs).tokens)
    stats = engine.stats().scheduler
    print(engine.info.scheduler, stats.counters.preemptions > 0, engine.info.pipeline_depth)
"""


@pytest.mark.timeout(300)
def test_the_plugin_of_the_document_passes_the_kit_and_serves(tmp_path):
    said = run_document("write-a-scheduler.md", tmp_path)
    assert "not tested: who comes back joins the next batch" in said
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(
        [sys.executable, "-c", SERVES, str(tmp_path / "checkpoint")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("batches True 2\n", 0), ended.stderr
    asked = [sys.executable, "-m", "fd_core.cli"]
    listed = subprocess.run([*asked, "plugins", "list"], env=environment, capture_output=True, text=True, check=True)
    assert "batches" in listed.stdout
    refused = subprocess.run(
        [*asked, "complete", "x", "--backend", "null", "--scheduler", "batches", "--kv-store", f"disk:{tmp_path}/kv"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "who comes back joins the next batch" in refused.stderr
