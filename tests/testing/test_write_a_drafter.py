"""The guide to drafters leads to ones that pass their kits; a fault in them fails the kit."""

from pathlib import Path

import pytest

from tests.plugin_sites import installed
from tests.testing.documents import follow, passed, run_line

pytestmark = pytest.mark.guide


def require_noticed(folder: Path, right: str, wrong: str, tests: str) -> None:
    """Replace a part of the drafter; the kit has to compare its drafts with those of a new one."""
    drafter = folder / f"fd_{folder.name}" / "drafter.py"
    text = drafter.read_text()
    assert text.count(right) == 1
    drafter.write_text(text.replace(right, wrong))
    assert "a new drafter with the same text has" in run_line(folder, f"pytest -k {tests}", code=1)


@pytest.mark.timeout(600)
def test_guide_leads_to_drafters_that_pass_their_kits(tmp_path):
    folder, outputs = follow("write-a-drafter.md", tmp_path)
    (_, check), (_, texts), _, (_, states) = outputs[1:]
    assert "no problems found" in check
    assert passed(texts) >= 50
    assert passed(states) >= 6
    require_noticed(folder, "self._row_of[slots]", "self._row_of[slots[::-1]]", "chunked")


@pytest.mark.timeout(600)
def test_fault_in_the_template_of_drafters_fails_the_kit(tmp_path):
    run_line(tmp_path, "fdcore plugins new texts --kind drafter")
    installed(tmp_path / "texts")
    assert "not looked at" in run_line(tmp_path / "texts", "pytest -k length_of_the_model --fd-coverage fd-texts")
    require_noticed(tmp_path / "texts", "self._last[slot], self._following[slot] = None, {}", "pass", "test_case")
