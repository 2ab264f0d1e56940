"""`fdcore conformance`: the report card of backends, schedulers, postprocessors or parsers."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from fd_core.cli.report import reports_errors
from fd_core.errors import ConfigError

_TELLS_SECONDS: Final = 15.0
"""Between two lines of progress where there is no terminal."""


@reports_errors
def conformance(
    backends: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BACKEND]...", help="Installed backends, such as cpu, or cpu:dtype=float32,FD_ISA=avx2."
        ),
    ] = None,
    schedulers: Annotated[
        list[str] | None, typer.Option("--scheduler", metavar="NAME", help="Test a scheduler instead; may be repeated.")
    ] = None,
    postprocessors: Annotated[
        list[str] | None,
        typer.Option(
            "--postprocess",
            metavar="NAME",
            help="Test a postprocessor instead, such as torch or torch:backend=gpu_cuda; may be repeated.",
        ),
    ] = None,
    tool_parsers: Annotated[
        list[str] | None,
        typer.Option("--tool-parser", metavar="NAME", help="Test a parser of tool calls instead; may be repeated."),
    ] = None,
    reasoning_parsers: Annotated[
        list[str] | None,
        typer.Option("--reasoning-parser", metavar="NAME", help="Test a parser of reasoning instead; may be repeated."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every result to FILE.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the support table to FILE, one page.")
    ] = None,
    expression: Annotated[
        str | None, typer.Option("-k", metavar="EXPR", help="Run only the tests that match, as in pytest.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out production sizes and most random sequences: about a minute.")
    ] = False,
) -> None:
    """Run the conformance kit on backends, schedulers, postprocessors or parsers, and print their report cards.

    Each backend runs in a process of its own, against numpy as the oracle: operations, models, sampling, preempted-
    slot signalling, the step token budget, KV transfer, golden streams, crashes and memory, and then at production
    sizes, which takes minutes. A scheduler plans for scripted tokens, through hostile sequences of calls and
    incidents, beside an auditor that names the rule of the law that is broken. A postprocessor makes token matrices of
    every combination of rows, on the processor or on the backend that `backend=` names. A parser reads answers that are
    cut at every place. Each card says what was not looked at. The exit code is 0 if all pass, 1 if one does not, and 4
    if the tests could not be run to their end.
    """
    from fd_core.testing.kit.requirements import require_packages

    asked = (backends, schedulers, postprocessors, tool_parsers, reasoning_parsers)
    if sum(map(bool, asked)) != 1:
        kinds = "--scheduler, --postprocess, --tool-parser or --reasoning-parser"
        raise typer.BadParameter(f"name backends, or others with {kinds}: one of them, not several")
    require_packages()
    import msgspec
    from rich.console import Console

    from fd_core.testing.report.page import html_of
    from fd_core.testing.report.runs import KITS, run_suite
    from fd_core.testing.report.terminal import print_report

    for path in (json, html):
        require_writable(path)
    kit, targets = next((kit, targets) for kit, targets in zip(KITS, asked, strict=True) if targets)
    flag = kit.option.replace("--fd-", "--")
    named = targets if backends else [word for name in targets for word in (flag, name)]
    words = ["fdcore", "conformance", *named, *(("-k", expression) if expression else ()), *(("--quick",) * quick)]
    console, told = Console(), time.monotonic()
    with console.status("starting") as status:

        def progress(target: str, done: int, failed: int) -> None:
            nonlocal told
            state = f"{target}: {done} tests{f', {failed} failed' if failed else ''}"
            status.update(state)
            # A file or another program sees no status line, but wants to know as well whether it goes on.
            if not console.is_terminal and time.monotonic() > told + _TELLS_SECONDS:
                told = time.monotonic()
                print(state, file=sys.stderr, flush=True)

        report = run_suite(targets, expression, shlex.join(words), progress, quick=quick, kit=kit)
    print_report(report, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if html is not None:
        html.write_text(html_of(report), encoding="utf-8")
    if any(card.error is not None for card in report.cards):
        sys.exit(4)
    if not all(card.passed for card in report.cards):
        sys.exit(1)


def require_writable(path: Path | None) -> None:
    """Find out before the tests run, not after. Raises `ConfigError`."""
    try:
        if path is not None:
            path.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {(error.strerror or str(error)).lower()}", field="FILE") from error
