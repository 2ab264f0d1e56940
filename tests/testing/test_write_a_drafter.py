"""The guide to drafters leads to one that passes the kit; a fault in it fails the kit."""

import pytest

from tests.testing.documents import follow, passed, run_line

pytestmark = pytest.mark.guide


@pytest.mark.timeout(300)
def test_guide_leads_to_a_drafter_that_passes_the_kit(tmp_path):
    folder, outputs = follow("write-a-drafter.md", tmp_path)
    assert "no problems found" in outputs[-2][1]
    assert outputs[-1][0] == "pytest"
    assert passed(outputs[-1][1]) >= 50
    assert "not looked at" in run_line(folder, "pytest -k length_of_the_model --fd-coverage fd-mydrafter")
    drafter = folder / "fd_mydrafter" / "drafter.py"
    right = drafter.read_text()
    assert right.count("self._last[slot], self._following[slot] = None, {}") == 1
    drafter.write_text(right.replace("self._last[slot], self._following[slot] = None, {}", "pass"))
    assert "a new drafter with the same text has" in run_line(folder, "pytest -k test_case", code=1)
