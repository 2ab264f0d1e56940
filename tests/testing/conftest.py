"""Shortens what only correct plugins need, and lets those that share code take turns."""

from collections import Counter

import pytest

from fd_core.testing.kit import growth

MANY = 30


@pytest.fixture(autouse=True)
def _two_rounds_for_wrong_plugins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that grows does so in the first rounds; the later ones, for caches with a limit, take most of the time."""
    if request.node.name.startswith("test_wrong"):
        monkeypatch.setattr(growth, "ROUNDS", growth.ROUNDS[:2])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave each case of a class with the mark `in_turn` to one of some plugins; `nox -s soak` runs the others.

    Tests with few cases run for all plugins.
    """
    counts = Counter(item.nodeid.partition("[")[0] for item in items)
    for item in items:
        mark, (test, _, case) = item.get_closest_marker("in_turn"), item.nodeid.partition("[")
        if mark is not None and case and counts[test] > MANY:
            start = len(item.parent.name + item.function.__name__)
            if (start + sum(item.callspec.indices.values())) % mark.args[0]:
                item.add_marker(pytest.mark.soak)
