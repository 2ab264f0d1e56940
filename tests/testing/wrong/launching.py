"""Faults in launchers, each with the test of the kit that detects it."""

from __future__ import annotations

import os
import threading
from unittest import mock

from fd_core.launching import spawn
from fd_core.launching.owned import OwnedProcess
from fd_core.launching.spawn import SpawnLauncher

WRONG = {}
"""By class: the test that detects it."""


def found_by(test):
    """Name the test that detects a launcher, or the launcher of a class of processes."""

    def register(cls):
        launcher = cls
        if issubclass(cls, OwnedProcess):
            launcher = type(cls.__name__, (SpawnLauncher,), {"start": lambda self, specs: _start(self, specs, cls)})
        WRONG[launcher] = test
        return cls

    return register


def _start(launcher, specs, cls):
    with mock.patch.object(spawn, "OwnedProcess", cls):
        return SpawnLauncher.start(launcher, specs)


OUTPUT = "test_output_is_forwarded_and_its_end_is_in_the_reason"


@found_by(OUTPUT)
class ReadsTheOutputAtTheEnd(OwnedProcess):
    def _forward(self):
        self._process.wait()
        super()._forward()


class _FirstLines(list):
    def append(self, line):
        if len(self) < 10:
            super().append(line)


@found_by(OUTPUT)
class KeepsTheFirstLines(OwnedProcess):
    def _forward(self):
        self._lines = _FirstLines()
        super()._forward()


@found_by(OUTPUT)
class ForwardsNothing(OwnedProcess):
    def _forward(self):
        with self._process.stdout as output:
            self._lines.extend(raw.decode().rstrip("\n") for raw in output)


@found_by("test_a_terminated_process_may_take_its_time")
class KillsAfterTerminating(OwnedProcess):
    def terminate(self):
        super().terminate()
        threading.Timer(0.2, self._process.kill).start()


@found_by("test_a_process_announces_itself_and_runs")
class NamesAnotherProcess(OwnedProcess):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.pid = os.getpid()


@found_by("test_processes_are_returned_in_the_order_of_their_specs")
class StartsTheLargestFirst(SpawnLauncher):
    def start(self, specs):
        return super().start(sorted(specs, key=lambda spec: -spec.cores))


@found_by("test_none_is_left_if_one_cannot_be_started")
class StartsOneByOne(SpawnLauncher):
    def start(self, specs):
        self._require(specs)
        return tuple(process for spec in specs for process in super(StartsOneByOne, self).start([spec]))


@found_by("test_closing_ends_what_runs")
class ClosesPolitely(SpawnLauncher):
    def close(self):
        for process, _, _ in self._running:
            process.terminate()


@found_by("test_secrets_reach_the_process_and_nothing_else")
class ExportsSecrets(SpawnLauncher):
    def start(self, specs):
        for spec in specs:
            os.environ.update(spec.secrets)
        return super().start(specs)
