"""The guide to postprocessors leads to one that passes the kit and serves, found through its entry point."""

import re

import pytest

from fd_core.runner.observing import SampledRequest, SampledStep
from tests.testing.documents import ROOT, follow, passed, run_line, serve

pytestmark = pytest.mark.guide


@pytest.mark.timeout(400)
def test_guide_leads_to_a_postprocessor_that_passes_the_kit_and_serves(tmp_path):
    folder, outputs = follow("write-a-postprocessor.md", tmp_path)
    _, checked, card, tests, on_torch, with_texts = (words for _, words in outputs)
    assert "fd-mypost 0.1.0: mypost" in checked
    for each in (card, on_torch):
        assert "rules held: 1, 1.1, 1.2, 1.3, 1.9, 8" in each
    assert passed(tests) >= 30
    assert "passes" in with_texts
    serve(folder, "postprocess", "mypost")
    postprocess = folder / "fd_mypost" / "postprocess.py"
    postprocess.write_text(postprocess.read_text().replace("if gone := revoked", "if 0 and revoked"))
    card = run_line(folder, "fdcore conformance --postprocess mypost -k test_matrix", code=1)
    assert "but it was revoked, so its row must begin with -9" in card
    refused = run_line(folder, "fdcore complete x --backend null --postprocess torch", code=4)
    assert "the postprocessor torch does not support the backend null" in " ".join(refused.split())


def test_observer_of_the_guide_matches_the_counters():
    document = (ROOT / "docs" / "extend" / "write-a-postprocessor.md").read_text()
    [source] = re.findall(r"```python\n(from fd_core.runner.observing.*?)```", document, re.DOTALL)
    names: dict[str, type] = {}
    exec(source, names)
    observer = names["AcceptanceObserver"]()
    for number, accepted in enumerate((2, 0, 3)):
        observer.observe(SampledStep(1, number, (SampledRequest("r", tuple(range(accepted + 1)), 3, accepted),)))
    assert observer.accepted == {"r": 5}
