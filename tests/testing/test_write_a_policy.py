"""The guide to policies leads to two that pass their kits; a fault in either fails its kit."""

import pytest

from tests.testing.documents import follow, passed, run_line

pytestmark = pytest.mark.guide


@pytest.mark.timeout(900)
def test_guide_leads_to_policies_that_pass_their_kits(tmp_path):
    folder, outputs = follow("write-a-policy.md", tmp_path)
    _, checked, scheduling, _, checked_victims, victims = (words for _, words in outputs)
    assert "no problems found" in checked and "no problems found" in checked_victims
    assert passed(scheduling) >= 20 and passed(victims) >= 20
    policy = folder / "fd_spare" / "policy.py"
    right = policy.read_text()
    assert right.count("(running.arrivals,") == 1
    policy.write_text(right.replace("(running.arrivals,", "(0 * running.arrivals,"))
    assert "with the rows in another order" in run_line(folder, "pytest -k test_victim", code=1)
