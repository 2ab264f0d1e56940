"""The guide to launchers leads to one that passes the kit, found through its entry point."""

import pytest

from tests.testing.documents import follow, passed

pytestmark = pytest.mark.guide


def test_guide_leads_to_a_plugin_that_passes_the_kit(tmp_path):
    _, outputs = follow("write-a-launcher.md", tmp_path)
    assert "no problems found" in outputs[-2][1]
    assert outputs[-1][0] == "pytest"
    assert passed(outputs[-1][1]) >= 4
