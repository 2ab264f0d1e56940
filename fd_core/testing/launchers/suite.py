"""The cases that every launcher has to pass."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from unittest import mock

import pytest

from fd_core.launching.contract import NODE_ADDRESS, LaunchedProcess, Launcher, LaunchError, ProcessSpec, how_ended
from fd_core.plugins import LAUNCHER, installed_plugins
from fd_core.testing.axes.covering import Case
from fd_core.testing.axes.parts import note_held
from fd_core.testing.hooks.purity import moving_clocks
from fd_core.testing.kit.growth import require_idle
from fd_core.testing.kit.launched import CHILD_SECONDS, LINES, LONG_LINE
from fd_core.testing.kit.privacy import hidden_in_any_folder
from fd_core.testing.kit.processes import python, resource_snapshot
from fd_core.testing.kit.requirements import constructed
from fd_core.testing.stores.values import draws

_HIDDEN: Final = "hidden-beside-every-command"
_COMMON: Final = "FD_SUITE"
"""Variable that all processes and their launcher have."""
_WORDS: Final = ('a "b"', "", f"$HOME {{c}} {NODE_ADDRESS}", "ü\n'")
"""Arguments that a shell or a template would change."""
_LINE: Final = "the disk {0} is 100% full [/disk]"
"""Output that a format or a template would change."""
_NAMES_DEVICES: Final = "VISIBLE_DEVICES"
"""End of the names of variables that name devices, separated by commas."""
_UUIDS: Final = ",".join(f"GPU-{at:08x}-4a5e-11ee-be56-0242ac120002" for at in range(4))
_MOST_BYTES: Final = 2 << 20
"""Bytes of the output of one process that a launcher may hold."""
_AT_ONCE: Final = 33
"""Processes that are more than the threads of a usual pool."""
_END_SECONDS: Final = 3.0
"""Seconds after which the end of a process has been noticed."""
_CODES: Final = (0, 7, 255)
"""Exit codes of processes."""


class LauncherSuite:
    """Derive a class `Test...` from it and name the launcher."""

    launcher: str
    """Name under which a plugin registers it."""
    patience: float = 60.0
    """Timeout in seconds."""
    devices: Mapping[str, str] = MappingProxyType({"CUDA_VISIBLE_DEVICES": "5,7,11"})
    """Variables that name devices to a launcher; nothing runs on them."""

    def launcher_class(self) -> type[Launcher]:
        """Return the class of the launcher; override for a class that no plugin registers."""
        return installed_plugins().load(LAUNCHER, self.launcher)

    def new_launcher(self) -> Launcher:
        """Create the launcher where there are devices."""
        with mock.patch.dict(os.environ, self.devices):
            return self.launcher_class()()

    def construct(self) -> None:
        """Construct the plugin. Raises `PluginError`."""
        constructed(LAUNCHER, self.launcher_class(), self.new_launcher).close()

    @pytest.fixture
    def launching(self) -> Iterator[Launcher]:
        launcher = self.new_launcher()
        yield launcher
        launcher.close()

    def spec(self, name: str, *words: str, **values: Any) -> ProcessSpec:
        """Return the spec of a process that runs the suite's program, by default until it is terminated."""
        return ProcessSpec(name, ("-m", "fd_core.testing.kit.launched", *(words or ("stay",))), **values)

    def until(self, condition: Callable[[], Any], what: str = "the end of its processes") -> Any:
        deadline = time.monotonic() + self.patience
        while not (found := condition()):
            assert time.monotonic() < deadline, f"after {self.patience:g} seconds {what} is still missing"
            time.sleep(0.02)
        return found

    def seen(self, process: LaunchedProcess) -> dict[str, Any]:
        seen: dict[str, Any] = json.loads(self.announced_by(process))
        return seen

    def announced_by(self, process: LaunchedProcess) -> str:
        what = f"the announcement of {process.name}"
        self.until(lambda: process.announced() is not None or process.exit_code() is not None, what)
        announced = process.announced()
        assert announced is not None, f"{process.name} announced nothing, and {process.reason()}"
        return announced

    def test_output_is_forwarded_and_its_end_is_in_the_reason(
        self, launching: Launcher, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Print more than fits into a pipe, also in one line."""
        (process,) = launching.start([self.spec("one", "fail", "first", _LINE)])
        tracemalloc.start()  # after imports at the first start
        try:
            code = process.wait(self.patience)
            assert code is not None, (
                f"a process that prints a byte that is not UTF-8 and a line of {LONG_LINE:,} characters does not end; "
                "read all of its output"
            )
            assert code == process.exit_code() == 7
            assert "ended with exit code 7" in process.reason() and _LINE in process.reason(), (
                f"the reason lacks the last line, {_LINE!r}: {process.reason()[-300:]!r}"
            )
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < _MOST_BYTES, (
            f"after {LINES:,} lines of output the launcher holds {held:,} bytes more; keep the last lines only, as a "
            "server prints for weeks"
        )
        shown = ""

        def is_forwarded() -> bool:
            nonlocal shown
            shown += capfd.readouterr().err
            return "one | first" in shown and f"one | {_LINE}" in shown

        self.until(is_forwarded, f"the line {_LINE!r} in the output of the launcher")

    def test_the_reason_does_not_wait_for_children_of_the_process(self, launching: Launcher) -> None:
        """Nor does the last line, which has no end, or the announcement, for which nobody asked while it ran."""
        (process,) = launching.start([self.spec("two", "leave", _LINE)])
        assert process.wait(self.patience) == 7
        began = time.monotonic()
        reason = process.reason()
        seconds = time.monotonic() - began
        assert seconds < CHILD_SECONDS / 2, f"`reason` took {seconds:.0f} s: a child of the process has its output open"
        assert _LINE in reason, f"the reason lacks the last line, which has no end: {reason!r}"
        assert process.announced() == _LINE, (
            f"a process that ended at once announced {_LINE!r}, expected it also after its end, got "
            f"{process.announced()!r}"
        )

    def test_start_waits_for_no_announcement(self, launching: Launcher, tmp_path: Path) -> None:
        """Start processes that announce themselves later, in a thread that ends, and terminate one before that."""
        file = tmp_path / "ready"
        with ThreadPoolExecutor(1) as pool:
            specs = [self.spec("one", "after", str(file), cores=0), self.spec("two", "after", f"{file}-2", cores=0)]
            starting = pool.submit(launching.start, specs)
            returned, _ = wait([starting], self.patience)
            if not returned:
                file.touch()
                Path(f"{file}-2").touch()
        assert returned, f"start has not returned after {self.patience:g} seconds: it waits for an announcement"
        process, other = starting.result()
        other.terminate()
        code = other.wait(self.patience)
        assert code == -signal.SIGTERM, (
            f"terminate before a process announced itself: expected its end by SIGTERM, got {code}"
        )
        file.touch()
        self.seen(process)
        assert process.wait(0.1) is None, f"a process ended with the thread that started it: {process.reason()}"

    def test_a_terminated_process_ends_when_it_wants_to(self, launching: Launcher) -> None:
        (process,) = launching.start([self.spec("one", "drain", str(self.patience))])
        self.seen(process)
        process.terminate()
        with moving_clocks(self.launcher_class(), "time", "time_ns") as move, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(process.wait, 0.5)
            self.until(waiting.running)
            time.sleep(0.05)
            move(-3600)  # a time server sets it
            returned, _ = wait([waiting], 0.5 + _END_SECONDS)
            if not returned:
                process.kill()
        assert returned, "`wait` takes longer than its timeout if the clock of the machine is set back meanwhile"
        assert waiting.result() is None, "terminate ended it"
        while process.wait(0.5) is None:
            process.terminate()
        assert process.exit_code() == 3, "terminate waited for its end"

    def test_processes_start_and_end_in_any_order(self, launching: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
        """Use few names with two launchers, and check after each call all processes, also those that ended.

        Another child of this process, which no launcher started, ends meanwhile.
        """
        other, child = self.new_launcher(), python("raise SystemExit(9)")
        try:
            history = _History(self, (launching, other))
            history.run()
            self.new_launcher().close()  # of another deployment on these nodes
            history.check()
            history.close(other)
            history.check()
            child.communicate()
            assert child.returncode == 9, f"a process that another part started ended with 9, read {child.returncode}"
        finally:
            other.close()
        history.close(launching)
        shown, printed = "", history.printed()

        def are_forwarded() -> bool:
            nonlocal shown
            shown += capfd.readouterr().err
            return all(line in shown for line in printed)

        self.until(are_forwarded, "a line of a process in the output of the launcher")
        assert _HIDDEN not in shown, "a secret is in the output"
        for values in history.reached:
            note_held("launcher", values)

    def test_processes_end_with_their_launcher(self) -> None:
        """Kill the process of a launcher, once its processes have announced themselves: failing to would end them."""
        cls = self.launcher_class()
        code = (
            f"import time, {__name__} as kit, {cls.__module__} as own; launcher = own.{cls.__qualname__}(); "
            "suite = kit.LauncherSuite(); started = launcher.start([suite.spec(name, cores=0) for name in 'ab']); "
            "print(*[suite.seen(process)['pid'] for process in started], flush=True); time.sleep(600)"
        )
        with python(code) as launching:
            assert launching.stdout is not None
            pids = launching.stdout.readline().split()
            launching.kill()
        assert len(pids) == 2, "a launcher in another process started nothing"
        try:
            for pid in pids:
                self.until(partial(_is_over, int(pid)))
        finally:
            for pid in itertools.filterfalse(_is_over, map(int, pids)):
                os.kill(pid, signal.SIGKILL)

    @pytest.mark.timing
    @pytest.mark.fd_alone
    def test_processes_that_run_take_no_time_and_their_end_is_noticed(self, launching: Launcher) -> None:
        """Start more than a pool of threads has, wait for all of them, and end one."""
        processes = launching.start([self.spec(str(at), cores=0) for at in range(_AT_ONCE)])
        for process in processes:
            self.seen(process)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            codes = [pool.submit(process.wait, self.patience) for process in processes]
            try:
                require_idle("a launcher whose processes run")
                ended = time.monotonic()
                processes[-1].kill()
                code, seconds = codes[-1].result(), time.monotonic() - ended
            finally:
                for process in processes:
                    process.kill()
        assert code == -signal.SIGKILL and seconds < _END_SECONDS, (
            f"`wait` returned {code} {seconds:.1f} s after a SIGKILL, expected {-signal.SIGKILL} within "
            f"{_END_SECONDS:g}: the other ranks of a model wait as long before they end"
        )

    def test_processes_have_the_devices_of_their_launcher(self) -> None:
        """Take every device of all nodes, end the processes of one node but the second, and start one on the rest.

        A launcher that does not manage the devices of its cluster itself has those that variables name, also by UUID.
        """
        named = {name: value for name, value in self.devices.items() if name.endswith(_NAMES_DEVICES)}
        given: list[dict[str, str]] = [named, {name: value.rpartition(",")[2] for name, value in named.items()}]
        given += [{"CUDA_VISIBLE_DEVICES": _UUIDS}] if "CUDA_VISIBLE_DEVICES" in named else []
        found = list[list[str]]()
        for variables in given:
            with mock.patch.object(self, "devices", {**self.devices, **variables}):
                launching = self.new_launcher()
            try:
                found.append(self._devices_of_all(launching))
            finally:
                launching.close()
        for variables, devices in zip(given, found, strict=True):
            names = {name for value in variables.values() for name in value.split(",")}
            assert {*devices} == names or len({*map(len, found)}) == 1, (
                f"with the variables {variables}, processes have the devices {sorted(devices)}; on a shared machine "
                "others belong to other users, so pass on the names in the variable as they are"
            )

    def _devices_of_all(self, launching: Launcher) -> list[str]:
        nodes = {node.id: node for node in launching.nodes()}
        specs = [self.spec(str(at), cores=0, devices=1) for at in range(sum(node.devices for node in nodes.values()))]
        started = launching.start(specs)
        shown = {process: self.seen(process)["devices"] for process in started}
        there = [each for each in started if nodes[each.node].devices > 2]
        there = [each for each in there if each.node == there[0].node]
        for ended in (*there[:1], *there[2:]):
            ended.kill()
            assert ended.wait(self.patience) is not None
        if there:
            (process,) = launching.start([self.spec("several", cores=0, devices=len(there) - 1)])
            devices, seen = sorted(self.seen(process)["devices"]), [shown[each] for each in there]
            right = sorted(one for own in (*seen[:1], *seen[2:]) for one in own)
            assert devices == right, f"a process has {devices} of the devices {seen}, of which the second is in use"
            with pytest.raises(LaunchError):  # all are in use
                launching.start([self.spec("one more", cores=0, devices=1)])
        return [one for devices in shown.values() for one in devices]

    def test_other_users_of_the_machine_cannot_read_secrets(
        self, launching: Launcher, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Look at files that a launcher writes, such as for the variables of a process, and commands that it runs."""
        for at, hidden in enumerate(hidden_in_any_folder(tmp_path_factory.getbasetemp(), _HIDDEN.encode())):
            with hidden:
                (process,) = launching.start([self.spec(str(at), secrets={"FD_SUITE_KEY": _HIDDEN}, cores=0)])
                self.seen(process)

    def test_nothing_is_held_of_processes_that_ended(self, launching: Launcher) -> None:
        """Reserve all cores of a node, and fewer again and again, after a request for too many of them."""
        cores, held, ended = next(iter(launching.nodes())).cores, list[int](), list[weakref.ref[LaunchedProcess]]()
        there = sum(node.cores for node in launching.nodes())
        for fewer in range(10):
            own = max(1, cores - fewer)
            with pytest.raises(LaunchError, match=rf"{there + 1}.*{there}"):
                launching.start([self.spec("one", group="pair"), self.spec("two", cores=there, group="pair")])
            (process,) = launching.start([self.spec("one", cores=own)])
            seen = len(self.seen(process)["cores"])
            assert seen >= own, f"a process with {own} cores can run on {seen}"
            if not held:  # a cluster may wait for cores
                with pytest.raises(LaunchError):
                    launching.start([self.spec("two", cores=there - cores + 1)])
            process.kill()
            assert process.wait(self.patience) is not None
            held.append(sum(map(len, resource_snapshot()[:3])))
            ended.append(weakref.ref(process))
        assert held[-1] < held[1] + 4, f"open descriptors, mappings and threads after each process: {held}"
        gc.collect()
        left = sum(each() is not None for each in ended[:-2])
        assert left < len(ended) // 2, f"{left} of {len(ended)} processes that ended are still referenced"


@dataclass(frozen=True, eq=False)
class _Started:
    """A process that was started, and what it announced."""

    launcher: Launcher
    spec: ProcessSpec
    process: LaunchedProcess
    announced: str | None


class _History:
    """Processes of launchers, which start and end in a random order, and their expected exit codes."""

    def __init__(self, suite: LauncherSuite, launchers: Sequence[Launcher]) -> None:
        self._suite, self._launchers, self._draw = suite, launchers, draws(1)
        self._nodes = launchers[0].nodes()
        self._started: list[_Started] = []
        self._packed: list[bool] = []
        """For each group that is to be on few nodes, whether it is."""
        self._ended_before = 0
        """Processes that had ended at the last start."""
        self._codes: dict[_Started, int] = {}
        self.reached: list[Case] = []
        """Resources of each process, and the number of nodes of its group."""

    def run(self) -> None:
        """Make all moves with each launcher, in turns."""
        moves: list[Callable[[Launcher], object]] = [self._start, self._refuse, self._exit, self._exit]
        for move in (self._start, *self._draw.sample(moves, len(moves))):
            for launcher in self._launchers:
                move(launcher)
                self.check()

    def check(self) -> None:
        """Compare what each process reports with what happened to it, whatever happened to others of its name."""
        assert self._launchers[0].nodes() == self._nodes, "nodes change with the processes on them"
        taken, counted = list[tuple[int, str, object]](), any(node.devices for node in self._nodes)
        for each in self._started:
            spec, process, code = each.spec, each.process, self._codes.get(each)
            assert process.name == spec.name and process.announced() == each.announced
            assert process.exit_code() == process.wait(0.0) == code, f"{spec.name} should have ended with {code}"
            lines = process.reason().splitlines()
            assert lines[:1] == ([] if code is None else [how_ended(code)])
            assert lines[1:] == [spec.command[-1]] * (each.announced is None), f"{spec.name} has printed {lines[1:]}"
            if code is not None or spec.command[2] == "ignore":
                process.terminate()  # a no-op
            if code is not None:
                process.kill()
            else:
                seen = json.loads(each.announced or "")
                cores, devices = seen["cores"], seen["devices"] if counted else []
                assert len(devices) == spec.devices, f"a process with {spec.devices} devices sees {devices}"
                assert len(cores) >= spec.cores, f"a process with {spec.cores} cores can run on {cores}"
                own = (*devices, *(cores if len(cores) == spec.cores else ()))
                taken += [(id(each.launcher), process.node, one) for one in own]
        twice = [f"{one} of {node}" for (_, node, one), count in Counter(taken).items() if count > 1]
        assert not twice, f"two processes have the core or device {twice[0]}"
        for launcher in self._launchers:
            assert launcher.start([]) == ()
            assert launcher.here in (None, *(node.id for node in self._nodes)), f"{launcher.here} is no node"
            for name in ("cores", "devices"):
                with pytest.raises(LaunchError):
                    launcher.start([self._suite.spec("more", **{"cores": 0, name: self._free(launcher, name) + 1})])

    def close(self, launcher: Launcher) -> None:
        """Close a launcher, which ends its processes, also for threads that wait; their methods still return."""
        running = self._running(launcher)
        with ThreadPoolExecutor(1 + len(running)) as pool:
            waiting = [pool.submit(each.process.wait, self._suite.patience) for each in running]
            self._suite.until(lambda: all(code.running() for code in waiting))
            time.sleep(0.05)
            launcher.close()
            launcher.close()
            for code in waiting:
                assert code.result() is not None, "a thread that waits for a process did not see that `close` ended it"
        for each in running:
            self._suite.until(partial(_is_over, each.process.pid))
            ended = each.process.wait(0.0)
            assert ended is not None and each.process.exit_code() == ended and each.process.reason()
            self._started.remove(each)

    def printed(self) -> list[str]:
        """Return the lines that were printed, with the names of their processes."""
        return [f"{each.spec.name} | {each.spec.command[-1]}\n" for each in self._started if each.announced is None]

    def _running(self, launcher: Launcher) -> list[_Started]:
        return [each for each in self._started if each.launcher is launcher and each not in self._codes]

    def _names(self, launcher: Launcher) -> list[str]:
        """Return two names that are free, if necessary after the end of processes."""
        while len(running := self._running(launcher)) > 1:
            self._end(launcher)
        free = sorted({"one", "two", "three"} - {each.spec.name for each in running})
        return self._draw.sample(free, 2)

    def _start(self, launcher: Launcher, *actions: str) -> _Started:
        """Start two processes, and return the first one."""
        names, specs, free = self._names(launcher), list[ProcessSpec](), self._free(launcher, "cores")
        devices, spread = self._free(launcher, "devices"), len(self._started) // 4 % 2 == 1
        for name, action in zip(names, actions or ("stay", "ignore"), strict=True):
            number = len(self._started) + len(specs)
            words = [str(_CODES[number // 2 % len(_CODES)]), *_WORDS]
            specs.append(
                self._suite.spec(
                    name,
                    *(action, *words, NODE_ADDRESS, f"words of {number}"),
                    environment={f"FD_SUITE_{number}": f" {_WORDS}\n", "FD_SUITE_EMPTY": "", _COMMON: NODE_ADDRESS},
                    secrets={f"FD_SUITE_KEY_{number}": f"{_HIDDEN} {number}"},
                    cores=int(number > 0 and launcher is self._launchers[0] and len(specs) < free),
                    devices=int(len(specs) < devices),
                    group="a group",
                    spread=spread,
                )
            )
        # A cluster may learn late that processes ended.
        held = self._running(launcher), self._running(launcher) + [*self._codes][self._ended_before :]
        possible = [numbers for each in held if (numbers := self._numbers_of_nodes(each, specs))]
        wanted = {(max if spread else min)(numbers) for numbers in possible}
        with mock.patch.dict(os.environ, {_COMMON: "of the launcher"}):  # which a spec replaces
            processes = launcher.start(specs)
        found, self._ended_before = len({process.node for process in processes}), len(self._codes)
        if spread:
            assert found in wanted, f"a group with spread=True is on {found} nodes instead of {wanted}"
        else:  # packing may be best effort
            self._packed.append(found in wanted)
            assert any(self._packed) or len(self._packed) < 3, "no group with spread=False is on few nodes"
        for spec, process in zip(specs, processes, strict=True):
            own = {"cores": spec.cores, "devices": spec.devices, "spread": spread}
            self.reached.append({"nodes": len(self._nodes), **own, "nodes of its group": found})
            announced = None if spec.command[2] == "exit" else self._suite.announced_by(process)
            self._started.append(_Started(launcher, spec, process, announced))
            if announced is not None:
                seen = json.loads(announced)
                words = [process.address if word == NODE_ADDRESS else word for word in spec.command[3:]]
                assert seen["arguments"] == words, f"expected the arguments {words}, got {seen['arguments']}"
                assert seen["environment"] == {**spec.environment, _COMMON: process.address, **spec.secrets}
                lacks = [each for each in seen["lacks"] if each in os.environ and not each.endswith("VISIBLE_DEVICES")]
                assert not lacks, f"a process lacks variables of its node: {lacks[:9]}"
                unlike = ", ".join(seen["unlike its parent"])
                assert not unlike, f"a process has other settings than its node: {unlike}; leave them as they are"
                node = next(node for node in launcher.nodes() if node.id == process.node)
                assert seen["pid"] == process.pid and node.alive and node.address == process.address
                shown = repr(spec) + repr(process) + repr(launcher.nodes()) + "".join(seen["command"])
                assert _HIDDEN not in shown, "a secret is shown"
        return self._started[-2]

    def _free(self, launcher: Launcher, name: str) -> int:
        """Return the number of cores or devices that no process of the launcher has, asked to end or not."""
        there, taken = self._nodes, (each.spec for each in self._running(launcher))
        return sum(getattr(node, name) for node in there) - sum(getattr(spec, name) for spec in taken)

    def _numbers_of_nodes(self, holding: Sequence[_Started], specs: Sequence[ProcessSpec]) -> set[int]:
        """Return on how many nodes processes can be together, according to what the others leave free."""
        numbers, held = set(), [(each.process.node, each.spec) for each in holding]
        for nodes in itertools.product(self._nodes, repeat=len(specs)):
            there = [*held, *((node.id, spec) for node, spec in zip(nodes, specs, strict=True))]
            if all(
                sum(getattr(spec, name) for at, spec in there if at == node.id) <= getattr(node, name)
                for node, name in itertools.product(self._nodes, ("cores", "devices"))
            ):
                numbers.add(len(set(nodes)))
        return numbers

    def _exit(self, launcher: Launcher) -> None:
        ended = self._start(launcher, "exit", "ignore")
        right = int(ended.spec.command[3])
        code = ended.process.wait(self._suite.patience)
        assert code == right, f"a process exited with code {right}, its `wait` returned {code}"
        self._codes[ended] = code

    def _end(self, launcher: Launcher) -> None:
        """End a process while another thread waits for its end."""
        if not (running := self._running(launcher)):
            return
        each = self._draw.choice(running)
        ends, number = ("terminate", signal.SIGTERM) if each.spec.command[2] == "stay" else ("kill", signal.SIGKILL)
        with ThreadPoolExecutor(1) as pool:
            code = pool.submit(each.process.wait, self._suite.patience)
            self._suite.until(code.running)
            time.sleep(0.05)
            getattr(each.process, ends)()
            assert code.result() == -number, f"a thread that waits did not see the end by {number.name}"
        self._codes[each] = -number

    def _refuse(self, launcher: Launcher) -> None:
        """Start processes of which the last one cannot be started: none of their names is taken."""
        first, second = self._names(launcher)
        devices = sum(node.devices for node in self._nodes) + 1
        for bad, words in (
            (self._suite.spec(first, cores=0), first),
            (ProcessSpec(second, ("-c", "pass")), "-m"),
            (self._suite.spec(second, "stay", "x" * (1 << 22), cores=0), second),
            (self._suite.spec(second, cores=0, devices=devices), f"{devices} device"),
        ):
            with pytest.raises(LaunchError, match=words):
                launcher.start([self._suite.spec(first, cores=0), bad])


def _is_over(pid: int) -> bool:
    """Return True for a process that has ended, although its parent may not have read its exit code."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
