"""Runs the kit's cases of single operations on bare packs, without a backend."""

from __future__ import annotations

import pytest

from fd_core.config.envelope import OperatingEnvelope
from fd_core.testing.models.arrays import Values
from tests.ops.packs import FORMS


@pytest.fixture(scope="session", params=FORMS)
def ops(request):
    return FORMS[request.param]()


@pytest.fixture
def values():
    return Values(11)


@pytest.fixture
def envelope():
    """No pack of the core has a limit."""
    return OperatingEnvelope()


@pytest.fixture
def require():
    """No pack of the core lacks any operation."""
    return lambda *abilities: None
