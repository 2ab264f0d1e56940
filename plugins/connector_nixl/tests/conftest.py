"""Fixtures of all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _trusted_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consent to NIXL's port on the loopback, for processes that a test starts as well."""
    monkeypatch.setenv("FD_NIXL_TRUST_NETWORK", "yes")
