"""Optional requirements of the tests."""

from __future__ import annotations

import importlib.util

import pytest

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12")),
    reason="NIXL IS NOT INSTALLED: nothing is transferred here; `nox -s nixl` installs it and runs this",
)
