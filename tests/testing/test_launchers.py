"""The kit detects faults: each of these launchers breaks one promise, and the named test fails."""

import inspect
import os

import pytest

from fd_core.launching.contract import LaunchError
from fd_core.testing.axes.parts import take_held
from fd_core.testing.launchers import LauncherSuite
from tests.testing.wrong.launching import WRONG, SpreadsNoGroup, TwoNodes

FOUR = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
"""Two devices for each of two nodes."""


class SpreadsNoGroupOfOneNode(SpreadsNoGroup):
    """Its fault cannot show, as the other node has neither cores nor devices."""

    def __init__(self):
        super().__init__()
        self.parts = {"a": self.parts["a"]}


@pytest.mark.parametrize(("cls", "nodes"), [(TwoNodes, 2), (SpreadsNoGroupOfOneNode, 1)])
def test_report_lists_what_processes_were_given(cls, nodes, capfd):
    suite = LauncherSuite()
    suite.launcher_class, suite.devices = lambda: cls, FOUR
    launcher = suite.new_launcher()
    try:
        getattr(suite, HISTORY)(launcher, capfd)
    finally:
        launcher.close()
    reached = [values for part, values in take_held() if part == "launcher"]
    assert {values["nodes of its group"] for values in reached if values["spread"]} == {nodes}
    assert {values["nodes"] for values in reached} == {nodes}


HISTORY = "test_processes_start_and_end_in_any_order"
TIMED = {cls for cls in WRONG if "take_no_time" in WRONG[cls]}
"""Beside other tests they may pass by chance."""


@pytest.mark.in_turn(8, by=lambda cls: WRONG[cls])
@pytest.mark.parametrize(
    "cls",
    [pytest.param(cls, marks=pytest.mark.soak if cls in TIMED else (), id=cls.__name__) for cls in WRONG],
)
def test_wrong_launcher_fails_the_test_that_names_its_fault(cls, capfd, monkeypatch, tmp_path, tmp_path_factory):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    suite = LauncherSuite()
    suite.patience, suite.launcher_class, suite.devices = 5.0, lambda: cls, FOUR
    launcher = suite.new_launcher()
    test, fixtures = (
        getattr(suite, WRONG[cls]),
        {"launching": launcher, "capfd": capfd, "tmp_path": tmp_path, "tmp_path_factory": tmp_path_factory},
    )
    try:
        with pytest.raises((AssertionError, IndexError, LaunchError, pytest.fail.Exception)):
            test(**{name: fixtures[name] for name in inspect.signature(test).parameters})
    finally:
        for process, _, _ in getattr(launcher, "_running", ()):
            process.close()
        launcher.close()
