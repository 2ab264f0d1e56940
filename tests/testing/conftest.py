"""Shortens what only correct plugins need."""

import pytest

from fd_core.testing.axes import parts
from fd_core.testing.kit import growth


@pytest.fixture(autouse=True)
def _less_for_wrong_plugins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that grows does so in the first rounds; the later ones, for caches with a limit, take most of the time.

    Reducing a failing case takes long, too, and is only useful to people.
    """
    if request.node.name.startswith("test_wrong"):
        monkeypatch.setattr(growth, "ROUNDS", growth.ROUNDS[:2])
        monkeypatch.setattr(parts, "_SECONDS_TO_REDUCE", 0.0)
