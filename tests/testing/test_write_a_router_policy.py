"""The guide for router policies leads to one that passes the kit, and a fault put into it is caught."""

import pytest

from tests.testing.documents import follow, passed, run_line

pytestmark = pytest.mark.guide


def test_the_guide_leads_to_a_policy_that_passes_the_kit(tmp_path):
    folder, said = follow("write-a-router-policy.md", tmp_path)
    assert "no problems found" in said[-2][1]
    assert said[-1][0] == "pytest"
    assert passed(said[-1][1]) >= 7
    policy = folder / "fd_mypolicy" / "policy.py"
    right = policy.read_text()
    assert right.count("<= fewest + SLACK") == 1
    policy.write_text(right.replace("<= fewest + SLACK", "< 3"))
    assert "test_the_only_candidate_is_chosen" in run_line(folder, "pytest -k only_candidate", code=1)
