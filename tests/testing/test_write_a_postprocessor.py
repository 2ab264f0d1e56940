"""The postprocessor that the document writes passes the kit and serves, found as a user's would be."""

import os
import re
import subprocess
import sys

import pytest

from fd_core.runner.observing import SampledRequest, SampledStep
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
with target.engine(3, golden.whole(specs), 0.3, pipeline_depth=2, postprocess="lookup") as engine:
    golden.check(specs, run(engine, specs).tokens)
    stats = engine.stats().scheduler
    print(engine.info.postprocess, stats.counters.preemptions > 0, engine.info.pipeline_depth)
"""


@pytest.mark.timeout(300)
def test_the_plugin_of_the_document_passes_the_kit_and_serves(tmp_path):
    run_document("write-a-postprocessor.md", tmp_path)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "COLUMNS": "200"}
        command = (sys.executable, *command)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    ended = run("-c", SERVES, str(tmp_path / "checkpoint"))
    assert (ended.stdout, ended.returncode) == ("lookup True 2\n", 0), ended.stderr
    assert "postprocessor" in run("-m", "fd_core.cli", "plugins", "list").stdout
    checked = run("-m", "fd_core.cli", "plugins", "check", "lookup")
    assert "fd-lookup 0.1.0: lookup" in checked.stdout
    card = run("-m", "fd_core.cli", "conformance", "--postprocess", "lookup")
    assert card.returncode == 0, card.stdout
    assert "rules held: 1, 1.1, 1.2, 1.3, 1.9, 8" in card.stdout
    postprocess = tmp_path / "fd_lookup" / "postprocess.py"
    postprocess.write_text(postprocess.read_text().replace("if gone := revoked", "if 0 and revoked"))
    card = run("-m", "fd_core.cli", "conformance", "--postprocess", "lookup", "-k", "every_slot")
    assert card.returncode == 1, card.stdout
    assert "law 1.2: slot 0 carries [-1], though it was revoked: its row begins with -9" in card.stdout
    refused = run("-m", "fd_core.cli", "complete", "x", "--backend", "null", "--postprocess", "torch")
    assert refused.returncode == 4
    assert "the postprocessor torch is not for the backend null" in " ".join(refused.stderr.split())


def test_the_observer_of_the_document_adds_up():
    document = (ROOT / "docs" / "write-a-postprocessor.md").read_text()
    [source] = re.findall(r"```python\n(from fd_core.runner.observing.*?)```", document, re.DOTALL)
    names: dict[str, type] = {}
    exec(source, names)
    observer = names["AcceptanceObserver"]()
    for number, accepted in enumerate((2, 0, 3)):
        observer.observe(SampledStep(1, number, (SampledRequest("r", tuple(range(accepted + 1)), 3, accepted),)))
    assert observer.accepted == {"r": 5}
