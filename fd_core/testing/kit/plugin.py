"""The pytest plugin of the conformance kit: options, a marker, and helpers of the suites' conftest files."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

from fd_core.errors import FdError, PluginError

if TYPE_CHECKING:
    from fd_core.config.envelope import OperatingEnvelope
    from fd_core.testing.axes.parts import KitCase, Part
    from fd_core.testing.kit.expected import ExpectedFailure
    from fd_core.testing.report.coverage import CoverageRun

_Found = TypeVar("_Found")
_NAMED: Final = (
    ("backend", "NAME[:FIELD=VALUE,...]", "backend for `--pyargs fd_core.testing.suite`, with engine settings"),
    ("scheduler", "NAME", "scheduler for `--pyargs fd_core.testing.schedulers.suite`"),
    (
        "postprocess",
        "NAME[:FIELD=VALUE,...]",
        "postprocessor for `--pyargs fd_core.testing.postprocessors.suite`, with engine settings",
    ),
    ("tool-parser", "NAME", "tool parser for `--pyargs fd_core.testing.parsers.suite`"),
    ("reasoning-parser", "NAME", "reasoning parser for `--pyargs fd_core.testing.parsers.suite`"),
    ("model-family", "NAME", "family of models for `--pyargs fd_core.testing.models.families.suite`"),
    ("case", "CASE", "run only this case, such as layer:rows=65,window=none"),
    ("coverage", "NAME", "report lines of a distribution, file or folder that no test executed"),
)
"""Options that may be repeated."""
_PHASES: Final = ("all", "shared", "alone")
_WHOLE: Final = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""Exit codes of runs to the last test; a plugin under test that cannot be used ends one with that of its error."""
_SELECTING: Final = ("-k", "-m", "--deselect", "--lf", "--fd-case", "--fd-quick", "--fd-soak")
"""Options that select tests."""
_LONG: Final = 500
"""Length of values that are not compared element by element in a message."""
_COVERAGE: Final[pytest.StashKey[CoverageRun]] = pytest.StashKey()
_MEASURED: Final = "fdcore-coverage-"
"""Beginning of the name of the folder with the data of coverage."""
_HELD: Final = "fd_held"
"""Property of a report: part and values of a case that passed."""
_NOT_TESTED: Final = "not tested: "
"""Beginning of the reasons of `fd_core.testing.kit.requirements.lacks`."""
_REPORTED: Final = pytest.StashKey[set[str]]()
"""Reasons why plugins under test cannot be used that a test failed with."""
_EXPECTED: Final = pytest.StashKey[str]()
"""Line that lists a test as an expected failure."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suites, unless they exist already."""
    group = parser.getgroup("fd_core", "conformance kit of fd_core")
    with contextlib.suppress(ValueError):
        for name, metavar, what in _NAMED:
            help_text = f"{what}; may be repeated"
            group.addoption(f"--fd-{name}", action="append", default=[], metavar=metavar, help=help_text)
        group.addoption("--fd-quick", action="store_true", help="exclude production sizes and pairs of values")
        group.addoption(
            "--fd-seed", type=int, default=0, metavar="N", help="seed of the cases that cover pairs of values"
        )
        group.addoption("--fd-soak", type=float, metavar="SECONDS", help="run only cases, each part for its share")
        group.addoption("--fd-model", metavar="PATH", help="add cases with the shapes of this model's config.json")
        group.addoption("--fd-require-coverage", action="store_true", help="fail if --fd-coverage reports lines")
        group.addoption("--fd-expected-failures", metavar="FILE", help="tests that may fail: lines PATTERN  # REASON")
        group.addoption(
            "--fd-phase", choices=_PHASES, default="all", help="select tests that may, or may not, run concurrently"
        )


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Measure what `--fd-coverage` names, before conftest files import it. Raises `pytest.UsageError`."""
    names: list[str] = early_config.known_args_namespace.fd_coverage
    # Workers of xdist inherit the environment, and so are measured already.
    if names and _MEASURED not in os.environ.get("COVERAGE_PROCESS_START", ""):
        from fd_core.testing.kit.requirements import require_packages
        from fd_core.testing.report.coverage import CoverageRun

        try:
            require_packages("coverage")
            run = CoverageRun(names, Path(tempfile.mkdtemp(prefix=_MEASURED)))
        except FdError as error:
            raise pytest.UsageError(str(error)) from error
        early_config.stash[_COVERAGE] = run
        run.start()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Report coverage after the workers have ended."""
    yield
    if (run := session.config.stash.get(_COVERAGE, None)) is None:
        return
    from fd_core.testing.kit.expected import read_expected_failures

    path = session.config.getoption("--fd-expected-failures")
    found = run.finish([] if path is None else read_expected_failures(Path(path)), _incomplete(session))
    print("", *found.notes(), sep="\n")
    if found.unexcused and session.config.getoption("--fd-require-coverage"):
        session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)


def _incomplete(session: pytest.Session) -> str:
    """Return the reason why tests of the session did not run; empty if all ran."""
    options = [name for name in _SELECTING if session.config.getoption(name, None)]
    reasons = [f"{', '.join(options)} excluded tests"] if options else []
    if session.exitstatus not in _WHOLE or session.shouldstop or session.shouldfail:
        reasons.append("the run was interrupted")
    return " and ".join(reasons)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of the kit."""
    config.addinivalue_line("markers", "law(rule, ...): checks these invariants, docs/understand/law.md")
    config.addinivalue_line("markers", "fd_cases(part, ...): runs with `case` for each case of parts of the kit")
    config.addinivalue_line("markers", "timing: its verdict depends on elapsed time, compared within one run")
    config.addinivalue_line("markers", "fd_pairs: covers pairs of values, or a day; excluded by `--quick`")
    config.addinivalue_line("markers", "fd_thorough: repeats another test with other numbers, or takes seconds")
    config.addinivalue_line("markers", "fd_alone: measures time or memory; runs after the others, never beside them")
    config.pluginmanager.register(_NamesInOptions(), "fd-names")
    if config.getoption("--fd-soak") is not None:
        config.pluginmanager.register(_SharesOfTime(config.getoption("--fd-soak")), "fd-soak")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the marker `fd_cases` for each case of its parts."""
    mark = metafunc.definition.get_closest_marker("fd_cases")
    if mark is None:
        return
    metafunc.parametrize("case", [case for part in mark.args for case in _cases_of(part, metafunc.config)])


def _cases_of(part: Part[Any], config: pytest.Config) -> Sequence[Any]:
    """Return the cases of a part, or those that `--fd-case` names, as parameters."""
    from fd_core.testing.axes.parts import cases_of

    part = part.within(_envelope(config)) if part.edges else part
    named: list[str] = config.getoption("--fd-case")
    if named:
        texts = [text.partition(":")[2] for text in named if text.partition(":")[0] == part.name]
        return [pytest.param(chosen(text, part.case), id=f"{part.name}:{text}") for text in texts]
    found, quick = cases_of(part, config.getoption("--fd-seed"))
    cases = [
        pytest.param(case, id=str(case), marks=() if index < quick else pytest.mark.fd_pairs)
        for index, case in enumerate(found)
    ]
    if (path := config.getoption("--fd-model")) is not None and part.edges:
        cases += [pytest.param(case, id=str(case)) for case in chosen(path, lambda path: _shaped(part, path))]
    return cases


def _envelope(config: pytest.Config) -> OperatingEnvelope:
    """Return the tightest limits of the plugins under test; one that cannot be imported is reported by its fixture."""
    from fd_core.config.envelope import OperatingEnvelope
    from fd_core.plugins import BACKEND, POSTPROCESS, SCHEDULER, installed_plugins

    limits: dict[str, int] = {}
    for option, kind in (("--fd-backend", BACKEND), ("--fd-scheduler", SCHEDULER), ("--fd-postprocess", POSTPROCESS)):
        for text in config.getoption(option):
            with contextlib.suppress(FdError):
                cls: Any = installed_plugins().load(kind, text.partition(":")[0])
                for name, limit in cls.envelope.limits().items():
                    limits[name] = min(limit, limits.get(name, limit))
    return OperatingEnvelope(**limits)


def _shaped(part: Part[Any], path: str) -> Sequence[KitCase]:
    from fd_core.models.registry import spec_of_config

    return part.cases_of(spec_of_config(Path(path)))


class _NamesInOptions:
    """Looks up cases and expected failures among all tests, before any are deselected."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Mark expected failures. Raises `pytest.UsageError` for a case or a line that matches no test."""
        parts = {case.part.name for case in map(case_of, items) if case is not None}
        for case in config.getoption("--fd-case"):
            if case.partition(":")[0] not in parts:
                raise pytest.UsageError(f"no part of the kit has the case {case}; parts: {', '.join(sorted(parts))}")
        if (path := config.getoption("--fd-expected-failures")) is not None:
            from fd_core.testing.kit.expected import read_expected_failures

            try:
                _mark_expected(items, read_expected_failures(Path(path)))
            except FdError as error:
                raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what `--fd-case`, `--fd-quick`, `--fd-soak` and `--fd-phase` exclude."""
    if config.getoption("--fd-case") or config.getoption("--fd-soak") is not None:
        _deselect(config, items, lambda item: case_of(item) is None)
    if config.getoption("--fd-quick"):
        _deselect(config, items, lambda item: any(map(item.get_closest_marker, ("fd_scale", "fd_pairs"))))
    if (phase := config.getoption("--fd-phase")) != "all":
        # Without a report of deselected tests: the other phase runs them.
        items[:] = [item for item in items if (item.get_closest_marker("fd_alone") is None) == (phase == "shared")]


def _mark_expected(items: Sequence[pytest.Item], expected: Sequence[ExpectedFailure]) -> None:
    from fd_core.testing.kit.expected import OF_COVERAGE

    left = [line for line in expected if not line.pattern.startswith(OF_COVERAGE)]
    for item in items:
        _, section, test = identity_of(item)
        for line in expected:
            if not line.matches(section, test, case_of(item)):
                continue
            left = [each for each in left if each is not line]
            if not expectation_of(item):  # the first line that matches counts
                item.stash[_EXPECTED] = str(line)
                item.add_marker(pytest.mark.xfail(reason=line.reason, strict=False))
    if left:
        raise pytest.UsageError(f"the expected failure {left[0].pattern!r} matches no test; remove the line")


def _deselect(config: pytest.Config, items: list[pytest.Item], excluded: Callable[[pytest.Item], bool]) -> None:
    found = [excluded(item) for item in items]
    config.hook.pytest_deselected(items=[item for item, out in zip(items, found, strict=True) if out])
    items[:] = [item for item, out in zip(items, found, strict=True) if not out]


class _SharesOfTime:
    """Gives each part of the kit an equal share of some seconds; its remaining cases are not run."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._spent: dict[str, float] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._spent = {case.part.name: 0.0 for case in map(case_of, session.items) if case is not None}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        case = case_of(item)
        if case is None or self._spent[case.part.name] < self._seconds / len(self._spent):
            return None
        runner: Any = item.config.pluginmanager.getplugin("runner")
        runner.pytest_runtest_teardown(item, nextitem)  # of the test before
        return True

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if (case := case_of(item)) is not None:
            self._spent[case.part.name] += call.duration


def case_of(item: Any) -> KitCase | None:
    """Return the case that an item checks; None for a test without cases."""
    if item.get_closest_marker("fd_cases") is None:
        return None
    found = item.callspec.params["case"]
    return found if hasattr(found, "part") else None  # pytest makes an item without a case if there are none


def expectation_of(item: pytest.Item) -> str:
    """Return the line that lists an item as an expected failure; empty if there is none."""
    return item.stash.get(_EXPECTED, "")


def identity_of(item: pytest.Item) -> tuple[str, str, str]:
    """Return target, section and test of an item; a section is a file, or a folder of files."""
    path = Path(item.path)
    module = (path.parent if path.parent.parent.name == "suite" else path).stem.removeprefix("test_")
    function = getattr(item, "originalname", item.name)
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return "", module, function
    target = str(callspec.params.get("target", ""))
    parts = callspec.id.removeprefix(target).lstrip("-")
    return target, module, f"{function}[{parts}]" if parts else function


def rules_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the invariants that a test checks."""
    return tuple(rule for mark in item.iter_markers("law") for rule in mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test of a kit that leaves settings of the process changed; cases are checked one by one."""
    with _reported_once(item.config):
        if not _is_of_kit(item) or case_of(item) is not None:
            return (yield)
        from fd_core.testing.hooks.purity import unchanged_process

        with unchanged_process():
            return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Construct the plugin of a class of tests, after the fixtures that may select it or construct it in vain."""
    constructs = _is_of_kit(item) and hasattr(getattr(item, "cls", None), "construct")
    with _reported_once(item.config):
        try:
            return (yield)
        except pytest.skip.Exception:
            constructs = False
            raise
        finally:
            if constructs:
                item.instance.construct()


def _is_of_kit(item: pytest.Item) -> bool:
    return bool(getattr(item, "obj", item).__module__.startswith("fd_core.testing."))


@contextlib.contextmanager
def _reported_once(config: pytest.Config) -> Iterator[None]:
    """Skip a test whose plugin cannot be used, if a test failed for that reason before."""
    try:
        yield
    except PluginError as error:
        frames = traceback.walk_tb(error.__traceback__)
        names = {str(frame.f_globals.get("__name__")) for frame, _ in frames} - {__name__}
        reported = config.stash.setdefault(_REPORTED, set())
        if not any(name.startswith("fd_core.testing.") for name in names):
            raise
        if str(error) in reported:
            pytest.skip(f"not constructed: {error}")
        reported.add(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the invariants that a failed test checks, and the values at which a plugin held, to the report of a test."""
    report = yield
    if call.when == "call" and (_is_of_kit(item) or case_of(item) is not None):
        from fd_core.testing.axes.parts import take_held

        report.user_properties += [(_HELD, each) for each in take_held()]
    rules = rules_of(item)
    if rules and call.when == "call" and report.failed:
        from fd_core.testing.kit.law import RULES

        report.sections.append(("the law", "\n".join(f"{rule}: {RULES[rule]}" for rule in rules)))
    return report


def held_of(report: pytest.TestReport) -> list[tuple[str, dict[str, Any]]]:
    """Return parts and values at which a plugin held in a test."""
    return [value for name, value in report.user_properties if name == _HELD]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the values of each axis at which a plugin held, and the reasons why tests were skipped, as cards do."""
    held: dict[str, dict[str, set[Any]]] = {}
    for part, values in (each for report in terminalreporter.getreports("passed") for each in held_of(report)):
        for axis, value in values.items():
            held.setdefault(part, {}).setdefault(axis, set()).add(value)
    for part, axes in held.items():
        from fd_core.testing.report.model import values_text

        found = ", ".join(f"{axis} {values_text(values)}" for axis, values in axes.items())
        terminalreporter.write_line(f"held where tested, {part}: {found}")
    skipped = Counter(f"{report.longrepr[-1]}" for report in terminalreporter.getreports("skipped"))
    for text, count in skipped.items():
        _, is_limit, reason = text.partition(_NOT_TESTED)
        if is_limit:
            terminalreporter.write_line(f"limit, tests excluded: {count}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_assertrepr_compare(left: object, right: object) -> Generator[None, list[Any], list[Any]]:
    """Explain a comparison of long values by their first difference only.

    Where the environment names a CI system, pytest compares every pair of elements, which takes minutes.
    """
    if not all(isinstance(value, Sized) and len(value) > _LONG for value in (left, right)):
        return (yield)
    removed = {name: os.environ.pop(name) for name in ("CI", "BUILD_NUMBER") if name in os.environ}
    try:
        return (yield)
    finally:
        os.environ.update(removed)


def run_for_each(metafunc: pytest.Metafunc, option: str, kind: str) -> None:
    """Run a test once per name given with `option`; a test without the fixture `target` runs once."""
    if "target" not in metafunc.fixturenames:
        return
    names: list[str] = metafunc.config.getoption(option)
    if not names:
        raise pytest.UsageError(f"name the {kind} to test: {option}=NAME")
    metafunc.parametrize("target", list(dict.fromkeys(names)), indirect=True, scope="session")


def chosen(name: str, find: Callable[[str], _Found]) -> _Found:
    """Return the result of `find` for a name; on an error, end the run with its message and exit code."""
    try:
        return find(name)
    except FdError as error:
        raise pytest.exit.Exception(f"{name}: {error}", error.exit_code) from error
