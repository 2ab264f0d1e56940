"""Settings for every test."""

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, nothing about the property.
settings.register_profile("fd_core", deadline=None, suppress_health_check=(HealthCheck.too_slow,))
settings.load_profile("fd_core")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that hold slow tests: workers side by side then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
