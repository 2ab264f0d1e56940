"""The conformance kit for launchers: derive a class from `LauncherSuite`."""

from fd_core.testing.launchers.suite import LauncherSuite

__all__ = ["LauncherSuite"]
