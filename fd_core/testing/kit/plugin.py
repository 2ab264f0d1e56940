"""The pytest plugin of the conformance kit: options, a marker, and helpers of the suites' conftest files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Final, TypeVar

import pytest

from fd_core.errors import FdError

_Found = TypeVar("_Found")
_CASE_HELP: Final = "run only this case, such as layer:rows=65,window=none; may be repeated"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suites, unless they exist already."""
    group = parser.getgroup("fd_core", "conformance kit of fd_core")
    with contextlib.suppress(ValueError):
        several = "NAME[:FIELD=VALUE,...]"
        for name, metavar, what in (
            ("backend", several, "backend for `--pyargs fd_core.testing.suite`, optionally with engine settings"),
            ("scheduler", "NAME", "scheduler for `--pyargs fd_core.testing.schedulers.suite`"),
            ("postprocess", several, "postprocessor for `--pyargs fd_core.testing.postprocessors.suite`"),
            ("tool-parser", "NAME", "tool parser for `--pyargs fd_core.testing.parsers.suite`"),
            ("reasoning-parser", "NAME", "reasoning parser for `--pyargs fd_core.testing.parsers.suite`"),
        ):
            help_text = f"{what}; may be repeated"
            group.addoption(f"--fd-{name}", action="append", default=[], metavar=metavar, help=help_text)
        group.addoption("--fd-quick", action="store_true", help="drive a scheduler through fewer random sequences")
        group.addoption("--fd-case", action="append", default=[], metavar="CASE", help=_CASE_HELP)
        group.addoption(
            "--fd-seed", type=int, default=0, metavar="N", help="seed of the cases that cover pairs of values"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker by which tests name the rules of `fd_core.testing.kit.law` that they check."""
    config.addinivalue_line("markers", "law(rule, ...): checks these invariants, docs/understand/law.md")
    config.addinivalue_line("markers", "fd_cases(part): runs with `case` for each case of a part of the kit")
    config.addinivalue_line("markers", "timing: its verdict depends on elapsed time, compared within one run")
    config.addinivalue_line("markers", "fd_pairs: covers pairs of values; excluded by `fdcore conformance --quick`")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the marker `fd_cases` for each case of its part, or for those that `--fd-case` names."""
    mark = metafunc.definition.get_closest_marker("fd_cases")
    if mark is None:
        return
    from fd_core.testing.axes.parts import cases_of

    part = mark.args[0]
    named: list[str] = metafunc.config.getoption("--fd-case")
    if named:
        texts = [text.partition(":")[2] for text in named if text.partition(":")[0] == part.name]
        cases = [pytest.param(chosen(text, part.case), id=f"{part.name}:{text}") for text in texts]
    else:
        found, quick = cases_of(part, metafunc.config.getoption("--fd-seed"))
        cases = [
            pytest.param(case, id=str(case), marks=() if index < quick else pytest.mark.fd_pairs)
            for index, case in enumerate(found)
        ]
    metafunc.parametrize("case", cases)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all tests without cases if `--fd-case` names cases."""
    named: list[str] = config.getoption("--fd-case")
    if named:
        others = [item for item in items if item.get_closest_marker("fd_cases") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
        if not items:
            raise pytest.UsageError(f"no part of the kit has the case {named[0]}")


def rules_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the invariants that a test checks."""
    return tuple(rule for mark in item.iter_markers("law") for rule in mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the text of the invariants that a failed test checks to its report."""
    report = yield
    rules = rules_of(item)
    if rules and call.when == "call" and report.failed:
        from fd_core.testing.kit.law import RULES

        report.sections.append(("the law", "\n".join(f"{rule}: {RULES[rule]}" for rule in rules)))
    return report


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
