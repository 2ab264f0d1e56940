"""Lets the kit's cases of single operations run on the packs themselves, without a backend around them."""

from __future__ import annotations

import pytest

from tests.ops.packs import FORMS


@pytest.fixture(scope="session", params=FORMS)
def ops(request):
    return FORMS[request.param]()


@pytest.fixture
def require():
    """No pack of the core lacks anything."""
    return lambda *abilities: None
