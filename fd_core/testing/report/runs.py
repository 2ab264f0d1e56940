"""Runs the suite in one process per backend, which isolates frameworks, crashes and hangs."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import msgspec

import fd_core
from fd_core.errors import ConfigError, FdError, PluginError
from fd_core.plugins import (
    MODEL,
    POSTPROCESS,
    REASONING_PARSER,
    SCHEDULER,
    TOOL_PARSER,
    Kind,
    PluginOffer,
    installed_plugins,
)
from fd_core.testing.kit.expected import read_expected_failures
from fd_core.testing.kit.processes import RunEnd, follow
from fd_core.testing.kit.target import configured, environment_of, find_target
from fd_core.testing.report.coverage import CoverageRun, measured_names
from fd_core.testing.report.model import (
    INTERRUPTED,
    OF_OTHERS_THAN_SCHEDULERS,
    PARSER_SECTIONS,
    SECTIONS,
    AxisValue,
    Card,
    ConformanceReport,
    Result,
    values_text,
)
from fd_core.testing.report.recorder import (
    BackendDescribed,
    CaseEnded,
    CasesLeftOut,
    CaseStarted,
    RecordedEvent,
    RunMisused,
)
from fd_core.testing.report.scratch import scratch_folder


@dataclass(frozen=True, slots=True)
class Kit:
    """A suite of cases for one kind of plugin."""

    suite: str
    option: str
    sections: tuple[str, ...]
    find: Callable[[str], PluginOffer | None]
    """Looks up the plugin under test without importing it. Raises `FdError`."""
    others: Mapping[str, str] = field(default_factory=dict)


def _found(kind: Kind[Any]) -> Callable[[str], PluginOffer]:
    return lambda name: installed_plugins().find(kind, name)


BACKENDS: Final = Kit("fd_core.testing.suite", "--fd-backend", SECTIONS, find_target)
_PARSERS: Final = "fd_core.testing.parsers.suite"
KITS: Final = (
    BACKENDS,
    Kit(
        "fd_core.testing.schedulers.suite",
        "--fd-scheduler",
        sections=("signals", "budget", "blocks", "storage", "pairs", "cases", "lifetime", "day"),
        find=_found(SCHEDULER),
        others=OF_OTHERS_THAN_SCHEDULERS,
    ),
    Kit(
        "fd_core.testing.postprocessors.suite",
        "--fd-postprocess",
        sections=("matrix", "flight", "device"),
        find=lambda text: installed_plugins().find(POSTPROCESS, configured(text, Path()).name),
    ),
    Kit(_PARSERS, "--fd-tool-parser", sections=(*PARSER_SECTIONS, "calls"), find=_found(TOOL_PARSER)),
    Kit(_PARSERS, "--fd-reasoning-parser", sections=(*PARSER_SECTIONS, "reasoning"), find=_found(REASONING_PARSER)),
    Kit("fd_core.testing.models.families.suite", "--fd-model-family", sections=("family",), find=_found(MODEL)),
)
"""Kits in the order of `fdcore conformance`."""

_QUIET_SECONDS: Final = 600.0
"""Seconds without a new result after which the suite counts as hanging."""
_OWN_PLUGINS: Final = {"fd_core", "hypothesispytest", "timeout", "xdist", "xdist.looponfail"}
"""Plugins of pytest that load by themselves. Others of the environment would change the run and take time to import."""
_NO_TESTS: Final = 5
"""Exit code of pytest if all tests were deselected."""
RunProgress = Callable[[str, int, int], None]
"""Called with (target, tests done, tests that failed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Selection of tests, and how they run."""

    expression: str | None = None
    """pytest's `-k`."""
    quick: bool = False
    """Excludes slow tests."""
    cases: Sequence[str] = ()
    """Runs only these cases, such as `layer:rows=65`."""
    seed: int | None = None
    """Seed of the covering cases."""
    soak_seconds: float | None = None
    """Time for cases of fresh seeds; None runs the tests once."""
    workers: int = 1
    """Processes that run tests at the same time."""
    expected_failures: Path | None = None
    backends: Sequence[str] = ()
    """Backends that compute the models of a family; all if empty."""
    coverage: bool = False
    """Reports lines of the plugins that no test executes."""
    model: Path | None = None
    """`config.json`, or its folder, of a model whose shapes are tested in addition."""

    def arguments(self) -> list[str]:
        """Return the arguments of pytest, without those of one process."""
        found = [] if self.expression is None else ["-k", self.expression]
        found += [f"--fd-case={case}" for case in self.cases]
        found += [f"--fd-backend={backend}" for backend in self.backends]
        found += ["--fd-quick"] if self.quick else []
        found += [] if self.expected_failures is None else [f"--fd-expected-failures={self.expected_failures}"]
        found += [] if self.model is None else [f"--fd-model={self.model}"]
        return found

    def processes(self) -> Iterator[list[str]]:
        """Yield the additional arguments of each process that runs tests, one after the other."""
        seed = [] if self.seed is None else [f"--fd-seed={self.seed}"]
        workers = ["-n", str(self.workers), "--dist", "worksteal"] if self.workers > 1 and not self.cases else []
        if self.soak_seconds is not None:
            yield from self._soak(self.soak_seconds, workers)
        elif workers:
            yield [*seed, *workers, "--fd-phase=shared"]
            yield [*seed, "--fd-phase=alone"]
        else:
            yield seed

    def _soak(self, seconds: float, workers: list[str]) -> Iterator[list[str]]:
        end = time.monotonic() + seconds
        seeds = itertools.count(secrets.randbelow(2**31) if self.seed is None else self.seed)
        while (left := end - time.monotonic()) > 0:
            yield [f"--fd-seed={next(seeds)}", f"--fd-soak={left}", *workers]


def run_suite(
    targets: Sequence[str], options: RunOptions, command: str, progress: RunProgress, kit: Kit = BACKENDS
) -> ConformanceReport:
    """Run the suite for each target, one after the other.

    An interrupt ends it: the card then has the results so far and an error, and later targets have one without
    results. Raises `ConfigError` for a setting that does not exist, and if the options name a case or an expected
    failure that matches no test.
    """
    for target in targets:
        with contextlib.suppress(PluginError):  # the card of the target reports it
            kit.find(target)
    cards: list[Card] = []
    with scratch_folder("fdcore-coverage-") as folder:
        names = list(_measured(kit, targets)) if options.coverage else []
        measured = CoverageRun(names, folder) if names else None
        for target in targets:
            if cards and cards[-1].error == INTERRUPTED:
                cards.append(_card_of(kit, target, error=INTERRUPTED, seconds=0.0))
            else:
                environment = {} if measured is None else measured.environment
                cards.append(_card(kit, target, options, progress=progress, environment=environment))
        excuses = [] if options.expected_failures is None else read_expected_failures(options.expected_failures)
        coverage = [] if measured is None else [measured.result(excuses, _incomplete(cards, options))]
    return ConformanceReport(
        fd_core=fd_core.__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        command=command,
        cards=cards,
        coverage=coverage,
    )


def _incomplete(cards: Sequence[Card], options: RunOptions) -> str:
    """Return the reason why tests of the cards did not run; empty if all ran."""
    selecting = {
        "-k": options.expression,
        "--case": options.cases,
        "--quick": options.quick,
        "--soak": options.soak_seconds,
    }
    names = ", ".join(name for name, value in selecting.items() if value)
    count = sum(sum(card.deselected.values()) for card in cards)
    reasons = [f"{names} excluded {count:,} tests"] if count else []
    return " and ".join([*reasons, *(f"{card.target} was not finished: {card.error}" for card in cards if card.error)])


def _measured(kit: Kit, targets: Sequence[str]) -> Iterator[str]:
    """Yield what coverage measures; a plugin that cannot be found is reported by its card."""
    for target in targets:
        try:
            offer = kit.find(target)
        except FdError:
            continue
        if offer is None:
            raise ConfigError("`auto` is not the name of a plugin", field="--coverage", hint="name the backend")
        yield from measured_names(offer)


def _card(kit: Kit, target: str, options: RunOptions, progress: RunProgress, environment: Mapping[str, str]) -> Card:
    started = time.monotonic()
    try:
        kit.find(target)  # starting pytest takes seconds
    except FdError as error:
        return _card_of(kit, target, error=f"{target}: {error}".splitlines()[0], seconds=time.monotonic() - started)
    run = _Run()
    with scratch_folder("fdcore-conformance-") as folder:
        # Not those of a run of pytest that this one is part of.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        own = {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")}
        environment = {**inherited, **environment, **environment_of(target), **own}
        progress(target, 0, 0)
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # Ctrl-C, or SIGTERM while `follow` runs
            run.interrupted = True
            for arguments in options.processes():
                run.begin(arguments)
                results = folder / f"results{len(run.codes)}"
                for event in follow(
                    [*_command(kit, target, folder, results=results), *options.arguments(), *arguments],
                    results,
                    RecordedEvent,
                    most_quiet_seconds=_QUIET_SECONDS,
                    output=folder / "output",
                    stdin=subprocess.DEVNULL,
                    env=environment,
                ):
                    if isinstance(event, RunMisused):
                        raise ConfigError(event.message)
                    if run.add(event):
                        progress(target, len(run.results), run.failed)
                if run.is_broken:
                    break
            run.interrupted = False
        output = (folder / "output").read_text(errors="replace")
    return run.card(kit, target, output, seconds=time.monotonic() - started)


def _command(kit: Kit, target: str, folder: Path, results: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-p", "fd_core.testing.report.recorder", "-p", "no:cacheprovider"]
    # Files in the user's working folder must not affect the test run.
    (folder / "pytest.ini").write_text("[pytest]\n")
    command += ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--basetemp", str(folder / "files")]
    command += [
        f"-pno:{name}" for name in sorted({each.name for each in entry_points(group="pytest11")} - _OWN_PLUGINS)
    ]
    command += ["--pyargs", kit.suite, f"{kit.option}={target}", f"--fd-results={results}"]
    return [*command, "-q", "--tb=short"]


@dataclass
class _Run:
    """Summary of the events of the processes that test one plugin."""

    about: BackendDescribed | None = None
    results: dict[tuple[str, str], Result] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    held: dict[str, dict[str, set[AxisValue]]] = field(default_factory=dict)
    running: dict[tuple[str, str], CaseStarted] = field(default_factory=dict)
    """Tests in progress, one for each worker."""
    codes: list[int] = field(default_factory=list)
    """Exit codes of the processes."""
    seeds: list[int] = field(default_factory=list)
    silent: bool = False
    interrupted: bool = False

    @property
    def failed(self) -> int:
        return sum(result.outcome == "fail" for result in self.results.values())

    @property
    def is_broken(self) -> bool:
        """True if no further process can help."""
        return self.silent or any(code not in (0, 1, _NO_TESTS) for code in self.codes)

    def begin(self, arguments: Sequence[str]) -> None:
        """Prepare for the events of the next process."""
        self.seeds += [int(argument.partition("=")[2]) for argument in arguments if argument.startswith("--fd-seed=")]

    def add(self, event: RecordedEvent | RunEnd) -> bool:
        """Process an event; return True if a test ended."""
        match event:
            case BackendDescribed():
                self.about = event
            case CaseStarted():
                self.running[event.section, event.test] = event
            case RunEnd():
                self.codes.append(event.code)
                self.silent = event.silent
            case CasesLeftOut():
                # All processes collect the same tests.
                self.left_out[event.section] += 0 if self.codes else event.count
            case CaseEnded():
                # A failure in teardown overrides the outcome of the test.
                self.results[event.result.section, event.result.test] = event.result
                self.running.pop((event.result.section, event.result.test), None)
                for part, values in event.held:
                    axes = self.held.setdefault(part, {})
                    for axis, value in values.items():
                        axes.setdefault(axis, set()).add(value)
                return True
        return False

    def card(self, kit: Kit, target: str, output: str, seconds: float) -> Card:
        """Return the card of the run; `output` is the output of its processes."""
        if self.interrupted:
            return self._card(kit, target, error=INTERRUPTED, seconds=seconds)
        error, code = None, min(self.codes, default=0)
        how = "timed out" if self.silent else "ended the process" + (f" with signal {-code}" if code < 0 else "")
        crashed = self.silent or code < 0
        for section, test in self.running if crashed or not self.is_broken else ():
            self.results[section, test] = Result(section=section, test=test, outcome="fail", reason=f"it {how}")
        if crashed:
            tests = ", ".join(test for _, test in self.running) or "a test"
            error = f"{tests} {how}; later tests were not run"
        elif self.is_broken or not self.results:
            lines = [line for line in output.splitlines() if line.strip()]
            reasons = [
                line.strip("! ").removeprefix("_pytest.outcomes.Exit: ") for line in lines if line.startswith("!")
            ]
            error = (reasons or lines or ["pytest could not be run"])[-1]
        return self._card(kit, target, error=error, seconds=seconds)

    def _card(self, kit: Kit, target: str, error: str | None, seconds: float) -> Card:
        about = {} if self.about is None else msgspec.structs.asdict(self.about)
        return _card_of(
            kit,
            target,
            error=error,
            seconds=seconds,
            results=list(self.results.values()),
            deselected=dict(self.left_out),
            held={
                part: {axis: values_text(values) for axis, values in axes.items()} for part, axes in self.held.items()
            },
            seeds=tuple(self.seeds),
            **about,
        )


def _card_of(kit: Kit, target: str, *, seconds: float, **parts: Any) -> Card:
    return Card(target=target, sections=kit.sections, others=dict(kit.others), seconds=round(seconds, 1), **parts)
