"""The guide to stores leads to one that passes the kit, found through its entry point."""

import pytest

from tests.testing.documents import follow, passed

pytestmark = pytest.mark.guide


def test_guide_leads_to_a_store_that_passes_the_kit(tmp_path):
    _, outputs = follow("write-a-store.md", tmp_path)
    assert "no problems found" in outputs[-2][1]
    assert outputs[-1][0] == "pytest -rs"
    assert passed(outputs[-1][1]) >= 30
    assert "not tested: an SQLite file grows" in outputs[-1][1]
    assert "held where tested, store: keys case of letters; " in outputs[-1][1]
    assert "limit, tests excluded: 1: Door has no server to restart" in outputs[-1][1]
