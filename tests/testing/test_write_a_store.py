"""The guide for stores leads to one that passes the kit, found through its entry point as a user's would be."""

import pytest

from tests.testing.documents import follow, passed

pytestmark = pytest.mark.guide


def test_the_guide_leads_to_a_store_that_passes_the_kit(tmp_path):
    _, said = follow("write-a-store.md", tmp_path)
    assert "no problems found" in said[-2][1]
    assert said[-1][0] == "pytest -rs"
    assert passed(said[-1][1]) >= 30
    assert "not tested: an SQLite file grows" in said[-1][1]
