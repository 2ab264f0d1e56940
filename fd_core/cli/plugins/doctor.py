"""`fdcore doctor`: each operation of a backend by itself, before anything else is tried on a new device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fd_core.cli.report import plain, reports_errors
from fd_core.errors import PluginError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fd_core.testing.doctor.model import DoctorReport, OpFinding


@reports_errors
def doctor(
    backend: Annotated[
        str, typer.Argument(metavar="BACKEND", help="An installed backend, such as cpu, or cpu:dtype=float32.")
    ],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="OPERATION", help="Try only this one; may be repeated.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every finding to FILE.")] = None,
) -> None:
    """Try each operation of a backend by itself, and say what is missing, wrong, on the host or slow.

    Every operation is computed in each dtype that the backend offers, in three sizes, and compared with numpy as the
    conformance kit compares it. The largest is timed beside a floor: the bytes that must move, at the bandwidth of a
    copy on the same device. It runs in a process of its own, so an operation that ends the process is named like
    any other. The exit code is 0 if all is well, and 4 if an operation is missing or wrong.
    """
    import msgspec
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from fd_core.cli.plugins.conformance import require_writable
    from fd_core.testing.doctor.runs import run_doctor

    require_writable(json)
    console = Console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total or None)

        report = run_doctor(backend, show, only or ())
    _print(report, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if not report.well:
        sys.exit(PluginError.exit_code)


def _print(report: DoctorReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Operations of {report.backend}", title_justify="left")
    table.add_column("Operation", no_wrap=True)
    table.add_column("dtype")
    table.add_column("Is", overflow="fold")
    table.add_column("Time", justify="right")
    table.add_column("Times its floor", justify="right")
    groups: dict[tuple[str, str, str], list[OpFinding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.primitive, finding.case, finding.dtype), []).append(finding)
    for (primitive, case, dtype), findings in groups.items():
        _add_row(table, f"{primitive} {case}".rstrip(), dtype, findings)
    console.print(table)
    for pack in report.packs:
        speed = "not measured" if pack.bandwidth is None else f"{pack.bandwidth / 1e9:,.1f} GB/s"
        console.print(Text(f"{pack.dtype}: {plain(pack.device)}; a copy on it moves {speed}"))
        if pack.emulated:
            console.print(Text("  emulated: it did not run on the hardware it is for", "bold yellow"))
    bad = [finding for finding in report.findings if finding.bad]
    for finding in bad:
        where = " ".join(filter(None, (finding.primitive, finding.case, finding.dtype, finding.size)))
        console.print(Text(f"{where}: {finding.outcome}: {plain(finding.reason)}", "red"), soft_wrap=True)
    for reason in dict.fromkeys(finding.reason for finding in report.findings if finding.outcome == "limit"):
        console.print(Text(f"left out: {plain(reason)}", "yellow"), soft_wrap=True)
    names = dict.fromkeys(f"{finding.primitive} {finding.case}".rstrip() for finding in bad)
    verdict = f"missing or wrong: {', '.join(names)}" if names else "all operations are there and right"
    if not names and not report.well:
        verdict = "nothing could be examined"
    console.print(Text(f"{report.backend}: {verdict}", "bold green" if report.well else "bold red"), soft_wrap=True)


def _add_row(table: Table, name: str, dtype: str, findings: list[OpFinding]) -> None:
    from rich.text import Text

    state, style = "right", "green"
    if bad := [finding for finding in findings if finding.bad]:
        outcomes = dict.fromkeys(finding.outcome for finding in bad)
        state, style = f"{', '.join(outcomes)} ({', '.join(finding.size or 'all' for finding in bad)})", "bold red"
    elif all(finding.outcome == "limit" for finding in findings):
        state, style = "left out", "yellow"
    is_so: Text = Text(state, style)
    if fell_back := next((finding.fell_back for finding in findings if finding.fell_back), ""):
        is_so.append(f"\non the host: {plain(fell_back)}", "yellow")
    timed = next((finding for finding in findings if finding.seconds is not None), None)
    time = ratio = Text("")
    if timed is not None and timed.seconds is not None:
        time = Text(f"{timed.seconds * 1e3:,.3f} ms")
        if timed.ratio is not None:
            ratio = Text(f"{timed.ratio:,.1f}{' slow' if timed.slow else ''}", "yellow" if timed.slow else "")
    table.add_row(name, dtype, is_so, time, ratio)
