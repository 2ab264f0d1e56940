"""The cases that every launcher has to pass."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from fd_core.launching.contract import NODE_ADDRESS, LaunchedProcess, Launcher, LaunchError, ProcessSpec

_HIDDEN: Final = "hidden-beside-every-command"


class LauncherSuite:
    """Derive a class `Test...` from it and name the launcher."""

    launcher: str
    """Name under which a plugin registers it."""
    patience: float = 60.0
    """Timeout in seconds."""

    def launcher_class(self) -> type[Launcher]:
        """Return the class of the launcher; override for a class that no plugin registers."""
        from fd_core.plugins import LAUNCHER, installed_plugins

        return installed_plugins().load(LAUNCHER, self.launcher)

    @pytest.fixture
    def launching(self) -> Iterator[Launcher]:
        launcher = self.launcher_class()()
        yield launcher
        launcher.close()

    def spec(self, name: str, *words: str, **values: Any) -> ProcessSpec:
        """Return the spec of a process that runs the suite's program, by default until it is terminated."""
        return ProcessSpec(name, ("-m", "fd_core.testing.launchers.program", *(words or ("stay",))), **values)

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self.patience
        while not (found := condition()):
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.02)
        return found

    def seen(self, process: LaunchedProcess) -> dict[str, Any]:
        seen: dict[str, Any] = json.loads(self.announced_by(process))
        return seen

    def announced_by(self, process: LaunchedProcess) -> str:
        self.until(lambda: process.announced() is not None or process.exit_code() is not None)
        announced = process.announced()
        assert announced is not None, process.reason()
        return announced

    def test_a_process_announces_itself_and_runs(self, launching: Launcher) -> None:
        (process,) = launching.start([self.spec("one", "stay", "a b", "{c}")])
        assert self.seen(process)["arguments"] == ["a b", "{c}"]
        assert process.name == "one" and process.pid == self.seen(process)["pid"]
        assert process.exit_code() is None and process.reason() == "" and process.wait(0.0) is None
        node = next(node for node in launching.nodes() if node.id == process.node)
        assert node.alive and node.address == process.address

    def test_output_is_forwarded_and_its_end_is_in_the_reason(
        self, launching: Launcher, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Print more than fits into a pipe."""
        (process,) = launching.start([self.spec("one", "fail", "first", "the disk is full")])
        assert process.wait(self.patience) == process.exit_code() == 7
        assert "ended with exit code 7" in process.reason() and "the disk is full" in process.reason()
        shown = ""

        def is_forwarded() -> bool:
            nonlocal shown
            shown += capfd.readouterr().err
            return "one | first" in shown and "one | the disk is full" in shown

        self.until(is_forwarded)

    def test_a_terminated_process_may_take_its_time(self, launching: Launcher) -> None:
        (process,) = launching.start([self.spec("one", "drain")])
        self.seen(process)
        process.terminate()
        assert process.wait(self.patience) == 3

    def test_processes_are_returned_in_the_order_of_their_specs(self, launching: Launcher) -> None:
        specs = [self.spec("two", cores=0), self.spec("one", cores=1), self.spec("three", cores=0)]
        assert [process.name for process in launching.start(specs)] == ["two", "one", "three"]

    def test_none_is_left_if_one_cannot_be_started(self, launching: Launcher) -> None:
        with pytest.raises(LaunchError):
            launching.start([self.spec("one", cores=0), self.spec("two", "stay", "x" * (1 << 22), cores=0)])
        launching.start([self.spec("one", cores=0)])  # so none of that name runs

    @pytest.mark.parametrize(("method", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
    def test_exit_by_signal_is_reported_with_the_signal(
        self, launching: Launcher, method: str, number: signal.Signals
    ) -> None:
        (process,) = launching.start([self.spec("one")])
        self.seen(process)
        getattr(process, method)()
        assert process.wait(self.patience) == -number
        assert f"was ended by {number.name}" in process.reason()
        getattr(process, method)()  # a no-op now

    def test_process_receives_the_address_of_its_node(self, launching: Launcher) -> None:
        (process,) = launching.start([self.spec("one", "stay", NODE_ADDRESS, environment={"FD_SUITE_A": NODE_ADDRESS})])
        seen = self.seen(process)
        assert seen["arguments"] == [process.address] and seen["environment"] == {"FD_SUITE_A": process.address}

    def test_secrets_reach_the_process_and_nothing_else(
        self, launching: Launcher, capfd: pytest.CaptureFixture[str]
    ) -> None:
        spec = self.spec("one", secrets={"FD_SUITE_KEY": _HIDDEN}, environment={"FD_SUITE_A": "b"})
        (process,) = launching.start([spec])
        seen = self.seen(process)
        assert seen["environment"] == {"FD_SUITE_KEY": _HIDDEN, "FD_SUITE_A": "b"}
        assert _HIDDEN not in repr(spec) + repr(process) + repr(launching.nodes()) + "".join(seen["command"])
        assert _HIDDEN not in "".join(capfd.readouterr())
        (other,) = launching.start([self.spec("two", cores=0)])
        assert self.seen(other)["environment"] == {}, "another process sees them"

    def test_all_are_started_or_none(self, launching: Launcher) -> None:
        there = sum(node.cores for node in launching.nodes())
        specs = [self.spec("one", cores=1, group="pair"), self.spec("two", cores=there, group="pair")]
        with pytest.raises(LaunchError, match=rf"{there + 1}.*{there}"):
            launching.start(specs)
        (process,) = launching.start([self.spec("one", cores=1)])  # so the name and the CPU are free again
        self.seen(process)

    def test_resources_of_an_ended_process_are_free(self, launching: Launcher) -> None:
        every = next(iter(launching.nodes())).cores
        for _ in range(2):
            (process,) = launching.start([self.spec("one", cores=every)])
            self.seen(process)
            process.kill()
            assert process.wait(self.patience) is not None

    def test_a_name_belongs_to_one_process(self, launching: Launcher) -> None:
        launching.start([self.spec("one", cores=0)])
        with pytest.raises(LaunchError, match="one"):
            launching.start([self.spec("two", cores=0), self.spec("one", cores=0)])
        launching.start([self.spec("two", cores=0)])

    def test_devices_that_are_not_there_are_refused(self, launching: Launcher) -> None:
        there = sum(node.devices for node in launching.nodes())
        with pytest.raises(LaunchError, match=f"{there + 1} device"):
            launching.start([self.spec("one", cores=0, devices=there + 1)])

    def test_a_command_is_a_module(self, launching: Launcher) -> None:
        with pytest.raises(LaunchError, match="-m"):
            launching.start([ProcessSpec("one", ("-c", "pass"))])

    def test_closing_ends_what_runs(self, launching: Launcher) -> None:
        specs = [self.spec("one", "ignore", cores=0, group="pair"), self.spec("two", cores=0, group="pair")]
        processes = launching.start(specs)
        pids = [self.seen(process)["pid"] for process in processes]
        launching.close()
        launching.close()
        self.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
