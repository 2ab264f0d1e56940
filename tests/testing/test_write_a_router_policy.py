"""The guide to router policies leads to one that passes the kit; a fault in it fails the kit."""

import pytest

from tests.testing.documents import follow, passed, run_line

pytestmark = pytest.mark.guide


def test_guide_leads_to_a_policy_that_passes_the_kit(tmp_path):
    folder, outputs = follow("write-a-router-policy.md", tmp_path)
    assert "no problems found" in outputs[-2][1]
    assert outputs[-1][0] == "pytest"
    assert passed(outputs[-1][1]) >= 7
    policy = folder / "fd_mypolicy" / "policy.py"
    right = policy.read_text()
    assert right.count("<= fewest + SLACK") == 1
    policy.write_text(right.replace("<= fewest + SLACK", "< 3"))
    assert "test_case[router:" in run_line(folder, "pytest -x -k test_case", code=1)
