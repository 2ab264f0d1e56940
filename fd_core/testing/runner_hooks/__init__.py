"""Kits for hooks of the runner: derive a class from a suite and name the plugin."""

import pytest

pytest.register_assert_rewrite("fd_core.testing.runner_hooks.observers")

from fd_core.testing.runner_hooks.observers import ObserverSuite  # noqa: E402 -- after the call above

__all__ = ["ObserverSuite"]
