"""`fdcore conformance` and `fdcore doctor`: the report card of a plugin, and tests of single backend operations."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fd_core.cli.report import plain, reports_errors
from fd_core.errors import PluginError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fd_core.testing.report.doctor.runs import DoctorReport, OpFinding


_PROGRESS_SECONDS: Final = 15.0
"""Interval between two progress lines without a terminal, in seconds."""


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
        typer.Option("--tool-parser", metavar="NAME", help="Test a tool parser instead; may be repeated."),
    ] = None,
    reasoning_parsers: Annotated[
        list[str] | None,
        typer.Option("--reasoning-parser", metavar="NAME", help="Test a reasoning parser instead; may be repeated."),
    ] = None,
    model_families: Annotated[
        list[str] | None,
        typer.Option("--model-family", metavar="NAME", help="Test a family of models instead; may be repeated."),
    ] = None,
    computing: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="BACKEND",
            help="With --model-family: compute on this backend, such as cpu:dtype=float32; may be repeated.",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results to FILE.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the support table to FILE, as one page.")
    ] = None,
    expression: Annotated[
        str | None, typer.Option("-k", metavar="EXPR", help="Run only matching tests, as in pytest.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip production sizes and most random sequences; takes about a minute.")
    ] = False,
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="CASE", help="Run only this case, such as layer:rows=65; may be repeated."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="Seed of the cases that cover pairs of values.")
    ] = None,
    soak: Annotated[
        float | None,
        typer.Option("--soak", metavar="MINUTES", min=0.01, help="Run cases of fresh seeds until the time is over."),
    ] = None,
    workers: Annotated[
        int, typer.Option("-n", metavar="WORKERS", min=1, max=256, help="Processes that test one plugin.")
    ] = 1,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="PATH", help="Add cases with the shapes of this model's config.json."),
    ] = None,
    expected_failures: Annotated[
        Path | None,
        typer.Option(
            "--expected-failures", metavar="FILE", help="Tests and cases that may fail: lines PATTERN  # REASON."
        ),
    ] = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Report lines and branches of the plugin that no test executed.")
    ] = False,
    require_coverage: Annotated[
        bool, typer.Option("--require-coverage", help="Like --coverage; fail if there are some without an excuse.")
    ] = False,
) -> None:
    """Run the conformance kit on backends, schedulers, postprocessors, parsers or families of models.

    Each backend runs in a separate process, against numpy as the oracle: operations, models, sampling, preempted-
    slot signalling, the step token budget, KV transfer, golden streams, crashes and memory, and then at production
    sizes, which takes minutes. A scheduler plans for scripted tokens, through hostile sequences of calls and
    incidents, with an auditor that names each invariant that is violated. A postprocessor makes token matrices of
    every combination of rows, on the processor or on the backend that `backend=` names. A parser reads answers that are
    split at every position. A family of models is compared with transformers, on all backends or on those that
    --backend names. Each card lists what was not tested. The exit code is 0 if all pass, 1 if one fails
    or required coverage is missing, 2 if a setting, or the test of a case or an expected failure does not exist, and 4
    if the tests could not be completed.
    """
    from fd_core.testing.kit.requirements import EXTRA, FAMILIES_EXTRA, require_packages

    asked = (backends, schedulers, postprocessors, tool_parsers, reasoning_parsers, model_families)
    if sum(map(bool, asked)) != 1:
        kinds = "--scheduler, --postprocess, --tool-parser, --reasoning-parser or --model-family"
        raise typer.BadParameter(f"specify either backends or one of {kinds}")
    if computing and not model_families:
        raise typer.BadParameter("--backend selects the backends of --model-family; name other backends without it")
    coverage = coverage or require_coverage
    needed = {"coverage": coverage, "xdist": workers > 1, "torch": model_families, "transformers": model_families}
    packages = (name for name, is_needed in needed.items() if is_needed)
    require_packages(*packages, extra=FAMILIES_EXTRA if model_families else EXTRA)
    from rich.console import Console

    from fd_core.config.outputs import require_writable, write_json, write_whole
    from fd_core.models.registry import spec_of_config
    from fd_core.testing.kit.expected import read_expected_failures
    from fd_core.testing.report.page import html_of
    from fd_core.testing.report.runs import KITS, RunOptions, run_suite
    from fd_core.testing.report.terminal import print_report

    require_writable(json, "--json")
    require_writable(html, "--html")
    if expected_failures is not None:
        read_expected_failures(expected_failures)
    if model is not None:
        spec_of_config(model)
    options = RunOptions(
        expression=expression,
        quick=quick,
        cases=cases or (),
        seed=seed,
        soak_seconds=None if soak is None else soak * 60,
        workers=workers,
        backends=computing or (),
        coverage=coverage,
        model=None if model is None else model.absolute(),
        expected_failures=None if expected_failures is None else expected_failures.absolute(),
    )
    kit, targets = next((kit, targets) for kit, targets in zip(KITS, asked, strict=True) if targets)
    flag = kit.option.replace("--fd-", "--")
    words = ["fdcore", "conformance", *(targets if backends else [word for name in targets for word in (flag, name)])]
    for option, value in (
        ("-k", expression),
        ("--seed", seed),
        ("--soak", soak),
        ("-n", workers if workers > 1 else None),
    ):
        words += [] if value is None else [option, f"{value}"]
    words += [word for backend in options.backends for word in ("--backend", backend)]
    words += [word for case in options.cases for word in ("--case", case)]
    words += [] if model is None else ["--model", f"{model}"]
    words += [] if expected_failures is None else ["--expected-failures", f"{expected_failures}"]
    words += ["--require-coverage" if require_coverage else "--coverage"] if coverage else []
    command = shlex.join([*words, *(["--quick"] if quick else [])])
    console, last_printed = Console(), time.monotonic()
    with console.status("starting") as status:

        def progress(target: str, done: int, failed: int) -> None:
            nonlocal last_printed
            state = f"{target}: {done} tests{f', {failed} failed' if failed else ''}"
            status.update(state)
            # Without a terminal there is no status line, so print progress lines.
            if not console.is_terminal and time.monotonic() > last_printed + _PROGRESS_SECONDS:
                last_printed = time.monotonic()
                print(state, file=sys.stderr, flush=True)

        report = run_suite(targets, options, command, progress=progress, kit=kit)
    print_report(report, console)
    write_json(json, report)
    if html is not None:
        write_whole(html, html_of(report).encode(), "--html")
    if any(card.error is not None for card in report.cards):
        sys.exit(4)
    if not all(card.passed for card in report.cards) or (
        require_coverage and any(each.unexcused for each in report.coverage)
    ):
        sys.exit(1)


@reports_errors
def doctor(
    backend: Annotated[
        str, typer.Argument(metavar="BACKEND", help="An installed backend, such as cpu, or cpu:dtype=float32.")
    ],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="OPERATION", help="Test only this operation; may be repeated.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all findings to FILE.")] = None,
) -> None:
    """Test each operation of a backend by itself, and report operations that are missing, wrong, slow or on the host.

    Every operation is computed in each dtype that the backend offers, in cases of the conformance kit, and compared
    with numpy; a failing case is reduced to the values that matter. Large cases are timed against a floor: the bytes
    that must move, at the bandwidth of a copy on the same device. It runs in a separate process, so an operation that
    ends the process is reported like any other. The exit code is 0 if all operations pass, and 4 if one is missing or
    wrong.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from fd_core.config.outputs import require_writable, write_json
    from fd_core.testing.report.doctor.runs import run_doctor

    require_writable(json, "--json")
    console = Console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        shown = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal shown
            progress.update(task, description=what, completed=done, total=total or None)
            if not console.is_terminal and what != shown:
                print(f"{done + 1} of {total}: {what}", flush=True)
            shown = what

        report = run_doctor(backend, show, only or ())
    _print(report, console)
    write_json(json, report)
    if not report.well:
        sys.exit(PluginError.exit_code)


def _print(report: DoctorReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Operations of {report.backend}", title_justify="left")
    table.add_column("Operation", no_wrap=True)
    table.add_column("dtype")
    table.add_column("Is", overflow="fold")
    table.add_column("Calls", justify="right")
    table.add_column("Time", justify="right")
    table.add_column("Ratio to floor", justify="right")
    for finding in report.findings:
        _add_row(table, finding)
    console.print(table)
    for pack in report.packs:
        speed = "not measured" if pack.bandwidth is None else f"{pack.bandwidth / 1e9:,.1f} GB/s"
        console.print(Text(f"{pack.dtype}: {plain(pack.device)}; copy bandwidth {speed}"))
        if pack.emulated:
            console.print(Text("  emulated: it did not run on its target hardware", "bold yellow"))
    composed = {finding.primitive: len(finding.calls or ()) for finding in report.findings if finding.composed}
    if composed:
        parts = [f"{name} ({count})" for name, count in sorted(composed.items(), key=lambda each: -each[1])]
        text = f"composed of several framework calls, and therefore slow on a device: {', '.join(parts)}"
        console.print(Text(text, "yellow"), soft_wrap=True)
    bad = [finding for finding in report.findings if finding.bad]
    for finding in bad:
        where = " ".join(filter(None, (finding.primitive, finding.dtype)))
        console.print(Text(f"{where}: {finding.outcome}: {plain(finding.reason)}", "red"), soft_wrap=True)
    for reason in dict.fromkeys(finding.reason for finding in report.findings if finding.outcome == "limit"):
        console.print(Text(f"skipped: {plain(reason)}", "yellow"), soft_wrap=True)
    names = dict.fromkeys(finding.primitive for finding in bad)
    verdict = f"missing or wrong: {', '.join(names)}" if names else "all operations are present and correct"
    if not names and not report.well:
        verdict = "nothing could be tested"
    console.print(Text(f"{report.backend}: {verdict}", "bold green" if report.well else "bold red"), soft_wrap=True)


def _add_row(table: Table, finding: OpFinding) -> None:
    from rich.text import Text

    state, style = {"ok": ("right", "green"), "limit": ("skipped", "yellow")}.get(
        finding.outcome, (finding.outcome, "bold red")
    )
    is_so: Text = Text(state, style)
    if finding.fell_back:
        is_so.append(f"\non the host: {plain(finding.fell_back)}", "yellow")
    time = ratio = Text("")
    if finding.seconds is not None:
        time = Text(f"{finding.seconds * 1e3:,.3f} ms")
        if finding.ratio is not None:
            ratio = Text(f"{finding.ratio:,.1f}{' slow' if finding.slow else ''}", "yellow" if finding.slow else "")
    calls = "" if finding.calls is None else str(len(finding.calls))
    table.add_row(finding.primitive, finding.dtype, is_so, calls, time, ratio)
