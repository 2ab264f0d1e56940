"""The kit detects faults: each of these launchers breaks one promise, and the named test fails."""

import inspect
import os

import pytest

from fd_core.launching.contract import LaunchError
from fd_core.testing.launchers import LauncherSuite
from tests.testing.wrong.launching import WRONG


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_wrong_launcher_fails_the_test_that_names_its_fault(cls, capfd, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    suite, launcher = LauncherSuite(), cls()
    suite.patience, suite.launcher_class = 5.0, lambda: cls
    test, fixtures = getattr(suite, WRONG[cls]), {"launching": launcher, "capfd": capfd}
    try:
        with pytest.raises((AssertionError, LaunchError, pytest.fail.Exception)):
            test(**{name: fixtures[name] for name in inspect.signature(test).parameters})
    finally:
        for process, _, _ in launcher._running:
            process.close()
