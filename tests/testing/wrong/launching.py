"""Faults in launchers, each with the test of the kit that detects it."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

from fd_core.launching import owned, spawn
from fd_core.launching.child import child_command
from fd_core.launching.contract import Launcher, LaunchError, Node, require_startable
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


ANY_ORDER = "test_processes_start_and_end_in_any_order"
HELD = "test_nothing_is_held_of_processes_that_ended"
DEVICES = "test_processes_have_the_devices_of_their_launcher"
OUTPUT = "test_output_is_forwarded_and_its_end_is_in_the_reason"


@found_by("test_start_waits_for_no_announcement")
class StartsWhatIsReady(SpawnLauncher):
    def start(self, specs):
        started = super().start(specs)
        while any(process.announced() is None and process.exit_code() is None for process in started):
            time.sleep(0.02)
        return started


@found_by(ANY_ORDER)
class PassesKnownVariables(OwnedProcess):
    """Passes those that a Python process needs, but no proxy, folder of a cache or path of libraries."""

    def __init__(self, *arguments, **named):
        known = {name: os.environ[name] for name in os.environ if name.startswith(("PATH", "PYTHON", "FD_"))}
        with mock.patch.dict(os.environ, known, clear=True):
            super().__init__(*arguments, **named)


@found_by(ANY_ORDER)
class EndsWhatItFinds(SpawnLauncher):
    """Ends processes that an earlier launcher, which may have been killed, has left."""

    there: ClassVar = []

    def __init__(self):
        super().__init__()
        if len(self.there) > 1:  # two launchers may begin together
            for launcher in self.there:
                launcher.close()
        self.there.append(self)


@found_by(OUTPUT)
class ReadsTheOutputAtTheEnd(OwnedProcess):
    def _forward(self):
        self._process.wait()
        super()._forward()


@found_by("test_the_reason_does_not_wait_for_children_of_the_process")
class WaitsForTheEndOfTheOutput(OwnedProcess):
    def reason(self):
        if self.exit_code() is not None:
            self._reader.join()
        return super().reason()


@found_by(OUTPUT)
class ReadsShortLines(OwnedProcess):
    """The reader ends at a line that exceeds its buffer, as of asyncio."""

    def _forward(self):
        while len(raw := self._process.stdout.readline(1 << 16)) < 1 << 16:
            self._lines.append(line := raw.decode(errors="replace").rstrip("\n"))
            print(f"{self.name} | {line}", file=sys.stderr, flush=True)
        self._process.wait()


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
            self._lines.extend(raw.decode(errors="replace").rstrip("\n") for raw in output)


@found_by("test_a_terminated_process_ends_when_it_wants_to")
class KillsAfterTerminating(OwnedProcess):
    def terminate(self):
        super().terminate()
        threading.Timer(0.2, self._process.kill).start()


@found_by(ANY_ORDER)
class NamesAnotherProcess(OwnedProcess):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.pid = os.getpid()


@found_by(ANY_ORDER)
class StartsTheLargestFirst(SpawnLauncher):
    def start(self, specs):
        return super().start(sorted(specs, key=lambda spec: -spec.cores))


@found_by(ANY_ORDER)
class StartsOneByOne(SpawnLauncher):
    def start(self, specs):
        self._require(specs)
        return tuple(process for spec in specs for process in super(StartsOneByOne, self).start([spec]))


@found_by(ANY_ORDER)
class ClosesPolitely(SpawnLauncher):
    def close(self):
        for process, _, _ in self._running:
            process.terminate()


@found_by(ANY_ORDER)
class ExportsSecrets(SpawnLauncher):
    def start(self, specs):
        for spec in specs:
            os.environ.update(spec.secrets)
        return super().start(specs)


@found_by(ANY_ORDER)
class ForgetsAnnouncements(OwnedProcess):
    """A process that ended has no address."""

    def announced(self):
        return super().announced() if self.exit_code() is None else None


@found_by(ANY_ORDER)
class SharesNames(SpawnLauncher):
    """A name is taken if a process of another launcher has it."""

    taken = {}  # noqa: RUF012 - that is the fault

    def start(self, specs):
        for spec in specs:
            if spec.name in self.taken and self.taken[spec.name].exit_code() is None:
                raise LaunchError(f"a process named {spec.name} is already running")
        started = super().start(specs)
        self.taken.update({process.name: process for process in started})
        return started


@found_by(ANY_ORDER)
class FindsProcessesByName(SpawnLauncher):
    """A process that ended reports what happens to the next one of its name."""

    def start(self, specs):
        latest = self.__dict__.setdefault("latest", {})
        started = super().start(specs)
        latest.update({process.name: process for process in started})
        return tuple(_ByName(process, latest) for process in started)


class _ByName:
    def __init__(self, process, latest):
        self.name, self.pid, self.node, self.address = process.name, process.pid, process.node, process.address
        self._latest = latest

    def __getattr__(self, method):
        return getattr(self._latest[self.name], method)


@found_by(ANY_ORDER)
class ReportsTheEndOnce(OwnedProcess):
    reported = False

    def wait(self, seconds):
        code = None if self.reported else super().wait(seconds)
        self.reported = code is not None
        return code


@found_by(HELD)
class LeavesADescriptorOfEachProcess(SpawnLauncher):
    def start(self, specs):
        started = super().start(specs)
        self.__dict__.setdefault("left", []).extend(os.dup(2) for _ in started)
        return started

    def close(self):
        super().close()
        for descriptor in self.__dict__.pop("left", ()):
            os.close(descriptor)


@found_by(HELD)
class ListsWhatEnded(SpawnLauncher):
    """Keeps processes that ended, and their last lines, for a list."""

    def start(self, specs):
        started = super().start(specs)
        self.__dict__.setdefault("history", []).extend(started)
        return started


@found_by(HELD)
class LosesTheCoresOfARefusedGroup(SpawnLauncher):
    def start(self, specs):
        try:
            return super().start(specs)
        except LaunchError:
            self._cores = self._cores[specs[0].cores :]
            raise


@found_by(HELD)
class PinsToOneCore(OwnedProcess):
    """A process that has several cores runs on the first of them."""

    def __init__(self, *given, cores, **named):
        super().__init__(*given, cores=cores[:1], **named)


@found_by(ANY_ORDER)
class CountsFreeCores(SpawnLauncher):
    def nodes(self):
        taken = sum(len(cores) for process, cores, _ in self._running if process.exit_code() is None)
        return (Node("local", "127.0.0.1", len(self._cores) - taken, devices=len(self._devices)),)


@found_by("test_a_terminated_process_ends_when_it_wants_to")
class WaitsWhenItTerminates(OwnedProcess):
    def terminate(self):
        super().terminate()
        self.wait(20.0)


@found_by(ANY_ORDER)
class LocksWhileItWaits(OwnedProcess):
    """No other thread can end a process while one waits for its end."""

    def __init__(self, *arguments, **more):
        self.calls = threading.RLock()
        super().__init__(*arguments, **more)

    def wait(self, seconds):
        with self.calls:
            return super().wait(seconds)

    def terminate(self):
        with self.calls:
            super().terminate()

    def kill(self):
        with self.calls:
            super().kill()


@found_by(ANY_ORDER)
class PrefixesLinesWithTheLatestName(OwnedProcess):
    latest = SimpleNamespace(name="")

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.latest.name = self.name

    def _forward(self):
        time.sleep(0.1)  # so that all processes have their names
        own, self.name = self.name, self.latest.name
        super()._forward()
        self.name = own


@found_by(ANY_ORDER)
class PinsAllToTheFirstCores(SpawnLauncher):
    def start(self, specs):
        def pinned(*arguments, cores, **more):
            return OwnedProcess(*arguments, cores=self._cores[: len(cores)], **more)

        with mock.patch.object(spawn, "OwnedProcess", pinned):
            return super().start(specs)


class _Asked(OwnedProcess):
    asked = False

    def terminate(self):
        self.asked = True
        super().terminate()


@found_by(ANY_ORDER)
class FreesTheProcessorsOfATerminatedProcess(SpawnLauncher):
    def start(self, specs):
        none = frozenset()
        self._running = [(one, none, none) if one.asked else (one, *held) for one, *held in self._running]
        return _start(self, specs, _Asked)


@found_by(OUTPUT)
class ReadsUtf8Only(OwnedProcess):
    """Another byte ends the reader of the output."""

    def _end_lines(self, lines, rest):
        with suppress(UnicodeDecodeError):
            super()._end_lines([line.decode().encode() for line in lines], rest)


@found_by(ANY_ORDER)
class SharesTheFirstDevice(SpawnLauncher):
    """Devices are counted, but every process sees the first ones."""

    def start(self, specs):
        names = [",".join(self._devices[: spec.devices]) for spec in specs]
        seen = [{**spec.environment, "CUDA_VISIBLE_DEVICES": name} for spec, name in zip(specs, names, strict=True)]
        return super().start([replace(spec, environment=own) for spec, own in zip(specs, seen, strict=True)])


@found_by(ANY_ORDER)
class KeepsItsOwnVariables(OwnedProcess):
    """Variables of the launcher replace those of a process."""

    def __init__(self, spec, *arguments, **named):
        kept = {name: os.environ.get(name, value) for name, value in spec.environment.items()}
        super().__init__(replace(spec, environment=kept), *arguments, **named)


@found_by(ANY_ORDER)
class NamesItsHost(SpawnLauncher):
    """The node of this process has another name than in the list of nodes."""

    @property
    def here(self):
        return "localhost"


class TwoNodes(Launcher):
    """Intact: each of two nodes has half of the processors and devices of this machine."""

    def __init__(self):
        self.parts = {"a": SpawnLauncher(), "b": SpawnLauncher()}
        for at, part in enumerate(self.parts.values()):
            part._cores, part._devices = part._cores[at::2], part._devices[at::2]

    def nodes(self):
        parts = self.parts.items()
        return tuple(Node(name, "127.0.0.1", len(part._cores), len(part._devices)) for name, part in parts)

    def start(self, specs):
        running = [held for part in self.parts.values() for held in part._running if held[0].exit_code() is None]
        require_startable(specs, [process.name for process, _, _ in running])
        possible = [nodes for nodes in itertools.product(self.parts, repeat=len(specs)) if self.fit(specs, nodes)]
        if not possible:
            there = [sum(getattr(node, name) for node in self.nodes()) for name in ("cores", "devices")]
            asked = [sum(getattr(spec, name) for spec in specs) for name in ("cores", "devices")]
            raise LaunchError(f"{asked[0]} processors of {there[0]} and {asked[1]} devices of {there[1]}")
        started = []
        try:
            for spec, node in zip(specs, min(possible, key=lambda nodes: self.cost(specs, nodes)), strict=True):
                started += self.parts[node].start([spec])
                started[-1].node = node
        except LaunchError:
            for process in started:
                process.close()
            raise
        return tuple(started)

    def fit(self, specs, nodes):
        return all(
            sum(getattr(spec, name) for spec, at in zip(specs, nodes, strict=True) if at == node)
            <= len(there) - sum(len(held[index]) for held in part._running if held[0].exit_code() is None)
            for node, part in self.parts.items()
            for name, index, there in (("cores", 1, part._cores), ("devices", 2, part._devices))
        )

    def cost(self, specs, nodes):
        return -len(set(nodes)) if any(spec.spread for spec in specs) else len(set(nodes))

    def close(self):
        for part in self.parts.values():
            part.close()


@found_by(ANY_ORDER)
class SpreadsNoGroup(TwoNodes):
    def cost(self, specs, nodes):
        return len(set(nodes))


@found_by(ANY_ORDER)
class SpreadsEveryGroup(TwoNodes):
    def cost(self, specs, nodes):
        return -len(set(nodes))


@found_by(ANY_ORDER)
class ReservesAGroupForever(SpawnLauncher):
    """The name of a group stays taken after its processes have ended."""

    def start(self, specs):
        taken, names = self.__dict__.setdefault("taken", set()), {spec.group for spec in specs} - {None}
        if taken & names:
            raise LaunchError(f"the group {names} exists")
        started = super().start(specs)
        taken |= names
        return started


class _Started(OwnedProcess):
    """Starts its process in another way."""

    def __init__(self, spec, *arguments, **named):
        popen = subprocess.Popen

        def started(words, **more):
            words, more = self.changed(spec, words, more)
            return popen(words, **more)

        with mock.patch.object(owned.subprocess, "Popen", started):
            super().__init__(spec, *arguments, **named)


@found_by(ANY_ORDER)
class QuotesWordsForAShell(_Started):
    def changed(self, spec, words, more):
        return ["/bin/sh", "-c", "exec " + " ".join(f'"{word}"' for word in words)], more


@found_by(ANY_ORDER)
class LosesErrors(_Started):
    """Forwards standard output alone."""

    def changed(self, spec, words, more):
        return words, {**more, "stderr": subprocess.DEVNULL}


@found_by(ANY_ORDER)
class OmitsEmptyVariables(_Started):
    def changed(self, spec, words, more):
        return words, {**more, "env": {name: value for name, value in more["env"].items() if value}}


@found_by(ANY_ORDER)
class RunsInAnotherFolder(_Started):
    """Paths of models and stores may be relative."""

    def changed(self, spec, words, more):
        return words, {**more, "cwd": tempfile.gettempdir()}


@found_by(ANY_ORDER)
class RunsWithLowPriority(_Started):
    def changed(self, spec, words, more):
        return ["nice", "-n", "3", *words], more


@found_by(ANY_ORDER)
class StartsTheFirst(SpawnLauncher):
    """Takes the resources of a group from its first process, of which there may be none."""

    def start(self, specs):
        return super().start([specs[0], *specs[1:]])


@found_by("test_processes_end_with_their_launcher")
class IsNotWatchedByItsProcesses(SpawnLauncher):
    """A process notices the end of its launcher only if it announces itself later."""

    def start(self, specs):
        code = "import sys; from fd_core.launching import child; child._end_with_parent = id; child.main(*sys.argv[1:])"
        command = partial(_unwatched, code)
        with mock.patch.object(owned, "child_command", command):
            return super().start(specs)


def _unwatched(code, cores, *command):
    return [sys.executable, "-P", "-c", code, ",".join(map(str, cores)), *command]


@found_by(DEVICES)
class ShowsADeviceAndThoseAfterIt(OwnedProcess):
    """Takes devices for a range that begins at the first free one."""

    def __init__(self, spec, node, address, cores, environment):
        there = os.environ.get(spawn._DEVICES, "4,5,6,7").split(",")
        first = there.index(environment[spawn._DEVICES].split(",")[0]) if spec.devices else 0
        environment = {**environment, spawn._DEVICES: ",".join(there[first : first + spec.devices])}
        super().__init__(spec, node, address, cores=cores, environment=environment)


@found_by("test_other_users_of_the_machine_cannot_read_secrets")
class WritesItsEnvironmentToAFile(OwnedProcess):
    def __init__(self, spec, node, address, cores, environment):
        self._file = Path(tempfile.gettempdir(), f"{os.getpid()}-{time.monotonic_ns()}.env")
        self._file.write_text("".join(f"{name}={value}\n" for name, value in spec.secrets.items()))
        super().__init__(spec, node, address, cores=cores, environment=environment)

    def close(self):
        self._file.unlink(missing_ok=True)
        super().close()


@found_by("test_other_users_of_the_machine_cannot_read_secrets")
class PassesSecretsAsArguments(OwnedProcess):
    """`env` replaces its command soon, but whoever lists the processes meanwhile has the key."""

    def __init__(self, spec, node, address, cores, environment):
        secrets = [f"{name}={value}" for name, value in spec.secrets.items()]
        with mock.patch.object(owned, "child_command", lambda *words: ["env", *secrets, *child_command(*words)]):
            super().__init__(replace(spec, secrets={}), node, address, cores=cores, environment=environment)


@found_by(ANY_ORDER)
class HasNoCodeZero(OwnedProcess):
    """A process that ended well counts as one that runs."""

    def exit_code(self):
        return super().exit_code() or None

    def wait(self, seconds):
        return super().wait(seconds) or None


@found_by(ANY_ORDER)
class ReplacesTheAddressAnywhere(SpawnLauncher):
    """Also inside of other words, such as a template of chats."""

    def start(self, specs):
        with mock.patch.object(owned, "_at", lambda address, word: word.replace("{node}", address)):
            return super().start(specs)


@found_by(ANY_ORDER)
class WaitsForAnEvent(OwnedProcess):
    """A thread that waits does not see that the launcher was closed."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self._ended, self._closing = threading.Event(), False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        self._process.wait()
        if not self._closing:
            self._ended.set()

    def wait(self, seconds):
        if self._process.poll() is None:
            self._ended.wait(seconds)
        return self.exit_code() if self._closing is False or seconds == 0 else None

    def close(self):
        self._closing = True
        super().close()

    def kill(self):
        self._closing = sys._getframe(1).f_code.co_name == "close"
        super().kill()


@found_by("test_start_waits_for_no_announcement")
class TerminatesWhatIsReady(OwnedProcess):
    """The announcement names the process to which signals are sent."""

    def terminate(self):
        if self.announced() is not None:
            super().terminate()


@found_by("test_start_waits_for_no_announcement")
class EndsWithAThread(_Started):
    """The kernel ends a child with the thread that started it, unlike with the process."""

    def changed(self, spec, words, more):
        return words, {**more, "preexec_fn": lambda: ctypes.CDLL(None).prctl(1, 9)}


@found_by("test_the_reason_does_not_wait_for_children_of_the_process")
class ReadsAnnouncementsWhileItRuns(OwnedProcess):
    _found = None

    def announced(self):
        if self._found is None and self.exit_code() is None:
            self._found = super().announced()
        return self._found


@found_by("test_the_reason_does_not_wait_for_children_of_the_process")
class ReadsWholeLines(OwnedProcess):
    """The last line has no end while a child has the output open."""

    def _forward(self):
        for raw in self._process.stdout:
            self._end_lines([raw.rstrip(b"\n")], bytearray())


@found_by(OUTPUT)
class KeepsAllLines(OwnedProcess):
    def __init__(self, *arguments, **named):
        with mock.patch.object(owned, "_LAST_LINES", None):
            super().__init__(*arguments, **named)


RUNNING = "test_processes_that_run_take_no_time_and_their_end_is_noticed"


@found_by(RUNNING)
class PollsWithoutAPause(OwnedProcess):
    def wait(self, seconds):
        end = time.monotonic() + seconds
        while self.exit_code() is None and time.monotonic() < end:
            pass
        return self.exit_code()


@found_by(RUNNING)
class PollsAtTimes(OwnedProcess):
    """Asks for the state of a process every few seconds, as of a job of a cluster."""

    def wait(self, seconds):
        end = time.monotonic() + seconds
        while self.exit_code() is None and time.monotonic() < end:
            time.sleep(4.5)
        return self.exit_code()


@found_by(RUNNING)
class HasAFewThreads(SpawnLauncher):
    """The pool that reads the output of processes, and their announcements, serves four at once."""

    def start(self, specs):
        started = super().start(specs)
        for process in started[4:]:
            process.announced = lambda: None
        return started


@found_by(DEVICES)
class NamesDevicesByIndex(SpawnLauncher):
    """Of the devices 5 and 7 that it has, processes get 0 and 1, which are others'."""

    def __init__(self):
        super().__init__()
        self._devices = tuple(map(str, range(len(self._devices))))


@found_by(DEVICES)
class KnowsNumbersOfDevices(SpawnLauncher):
    """Names devices by numbers, and has none of those that a cluster names by UUID."""

    def __init__(self):
        super().__init__()
        self._devices = tuple(name for name in self._devices if name.isdigit())


@found_by(DEVICES)
class ReservesOneDeviceOfSeveral(SpawnLauncher):
    """Counts processes with devices, not their devices."""

    def start(self, specs):
        started = super().start(specs)
        self._running = [(process, cores, frozenset(sorted(own)[:1])) for process, cores, own in self._running]
        return started


@found_by(HELD)
class ReservesOneCoreOfSeveral(SpawnLauncher):
    def start(self, specs):
        started = super().start(specs)
        self._running = [(process, frozenset(sorted(own)[:1]), devices) for process, own, devices in self._running]
        return started


@found_by("test_a_terminated_process_ends_when_it_wants_to")
class WaitsByTheWallClock(OwnedProcess):
    def wait(self, seconds):
        end = time.time() + seconds
        while self.exit_code() is None and time.time() < end:
            time.sleep(0.02)
        return self.exit_code()


@found_by(ANY_ORDER)
class ReapsEveryChild(OwnedProcess):
    """Reads the exit codes of whatever ended, also of what other parts of the process started."""

    codes = {}  # noqa: RUF012 - of all launchers

    def exit_code(self):
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self.codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        return self.codes.get(self.pid)

    def wait(self, seconds):
        end = time.monotonic() + seconds
        while self.exit_code() is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.exit_code()
