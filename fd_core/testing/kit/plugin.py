"""The pytest plugin of the conformance kit: options and a marker, and nothing else until they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that the suites read, unless somebody else did."""
    group = parser.getgroup("fd_core", "conformance kit of fd_core")
    with contextlib.suppress(ValueError):
        group.addoption(
            "--fd-backend",
            action="append",
            default=[],
            metavar="NAME[:FIELD=VALUE,...]",
            help="backend for `--pyargs fd_core.testing.suite`, with engine settings if need be; may be repeated",
        )
        group.addoption(
            "--fd-scheduler",
            action="append",
            default=[],
            metavar="NAME",
            help="scheduler for `--pyargs fd_core.testing.schedulers.suite`; may be repeated",
        )
        group.addoption(
            "--fd-postprocess",
            action="append",
            default=[],
            metavar="NAME[:FIELD=VALUE,...]",
            help="postprocessor for `--pyargs fd_core.testing.postprocessors.suite`; may be repeated",
        )
        for kind in ("tool", "reasoning"):
            group.addoption(
                f"--fd-{kind}-parser",
                action="append",
                default=[],
                metavar="NAME",
                help=f"{kind} parser for `--pyargs fd_core.testing.parsers.suite`; may be repeated",
            )
        group.addoption("--fd-quick", action="store_true", help="drive a scheduler through fewer random sequences")


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker with which tests say which rules of `fd_core.testing.kit.law` they hold."""
    config.addinivalue_line("markers", "law(rule, ...): holds these rules of the law, docs/understand/law.md")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test the rules that it holds, word for word."""
    report = yield
    rules = [rule for mark in item.iter_markers("law") for rule in mark.args]
    if rules and call.when == "call" and report.failed:
        from fd_core.testing.kit.law import RULES

        report.sections.append(("the law", "\n".join(f"{rule}: {RULES[rule]}" for rule in rules)))
    return report
