"""The guides to plugins of one class lead to ones that pass their kits, found through their entry points."""

import pytest

from tests.testing.documents import follow, passed, run_line

pytestmark = pytest.mark.guide


@pytest.mark.parametrize(
    ("guide", "least"),
    [
        ("write-a-connector.md", 30),
        ("write-a-launcher.md", 4),
        ("write-a-router-policy.md", 7),
        ("write-a-scaling-policy.md", 50),
        ("write-a-store.md", 30),
        ("write-an-observer.md", 50),
    ],
)
def test_guide_leads_to_a_plugin_that_passes_the_kit(guide, least, tmp_path):
    folder, outputs = follow(guide, tmp_path)
    (_, checked), (command, tests) = outputs[-2:]
    assert "no problems found" in checked
    assert command in ("pytest", "pytest -rs")
    assert passed(tests) >= least
    if guide == "write-a-store.md":
        assert "not tested: an SQLite file grows" in tests
        assert "held where tested, store: keys case of letters; " in tests
        assert "limit, tests excluded: 1: Door cannot simulate full" in tests
    if guide == "write-a-router-policy.md":
        policy = folder / "fd_mypolicy" / "policy.py"
        right = policy.read_text()
        assert right.count("<= fewest + SLACK") == 1
        policy.write_text(right.replace("<= fewest + SLACK", "< 3"))
        assert "test_case[router:" in run_line(folder, "pytest -x -k test_case", code=1)
