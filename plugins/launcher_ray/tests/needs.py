"""Optional requirements of the tests."""

from __future__ import annotations

import importlib.util

import pytest

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="RAY IS NOT INSTALLED: nothing is placed on nodes here; `nox -s ray` installs it and runs this",
)
