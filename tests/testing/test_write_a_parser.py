"""The guide to parsers leads to two that pass the kit; a fault in one fails the case of its rule."""

import pytest

from tests.testing.documents import follow, passed, run_line

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
@pytest.mark.guide
def test_guide_leads_to_parsers_that_pass_the_kit(tmp_path):
    folder, outputs = follow("write-a-parser.md", tmp_path)
    _, checked, card, tests, _, of_reasoning = (words for _, words in outputs)
    assert "fd-mycalls 0.1.0: mycalls" in checked
    for each in (card, of_reasoning):
        assert "passes" in each
        assert "rules held: 8, 8.1, 8.2, 8.3, 8.4" in each
        assert "rules not tested" not in each
    assert passed(tests) >= 30
    parser = folder / "fd_mythoughts" / "parser.py"
    right = parser.read_text()
    assert right.count("emit=self.emit_reasoning") == 1
    parser.write_text(right.replace("emit=self.emit_reasoning", "emit=self.drop"))
    wrong = run_line(folder, "fdcore conformance --reasoning-parser mythoughts --case answer:plain", code=1)
    assert "law 8.3: reasoning differs at 0: expected" in wrong
