"""Shortens what only correct plugins need."""

import pytest

from fd_core.testing.kit import growth


@pytest.fixture(autouse=True)
def _two_rounds_for_wrong_plugins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that grows does so in the first rounds; the later ones, for caches with a limit, take most of the time."""
    if request.node.name.startswith("test_wrong"):
        monkeypatch.setattr(growth, "ROUNDS", growth.ROUNDS[:2])
