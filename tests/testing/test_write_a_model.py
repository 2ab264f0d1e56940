"""The guide to families leads to one that passes the kit; a fault in it fails the kit."""

import pytest

from tests.testing.documents import follow, passed, run_line

pytestmark = pytest.mark.guide


@pytest.mark.timeout(600)
def test_guide_leads_to_a_family_that_passes_the_kit(tmp_path):
    folder, outputs = follow("write-a-model.md", tmp_path)
    _, checked, template, card, tests = (words for _, words in outputs)
    assert "no problems found" in checked
    for each in (template, card):
        assert "mymodel passes" in each
    assert passed(tests) >= 20
    family = folder / "fd_mymodel" / "family.py"
    right = family.read_text()
    assert right.count(", interleaved=True") == 1
    family.write_text(right.replace(", interleaved=True", ""))
    wrong = run_line(folder, "fdcore conformance --model-family mymodel --backend reference -k logits", code=1)
    assert "the first wrong position is 1" in wrong
