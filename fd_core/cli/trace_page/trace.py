"""`fdcore trace`: a run, step by step, as an HTML page or for the Perfetto viewer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fd_core.cli.report import reports_errors
from fd_core.errors import ConfigError

if TYPE_CHECKING:
    from fd_core.engine.tracing.reader import TraceContents


@reports_errors
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file that `fdcore serve --trace FILE` wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Output file for the page or the JSON.",
            show_default="FILE with the suffix .html or .perfetto.json",
        ),
    ] = None,
    written: Annotated[
        Literal["html", "perfetto"],
        typer.Option("--format", help="html: one page for a browser; perfetto: JSON for ui.perfetto.dev."),
    ] = "html",
    last: Annotated[int, typer.Option(metavar="N", min=1, help="Show the last N steps.")] = 100_000,
) -> None:
    """Render a trace as one HTML page that needs no network, or as JSON for the Perfetto viewer.

    Both show slots over time, budget, KV blocks, preemptions and returns, KV loaded and recomputed, speculation, queue
    and step time. A truncated or damaged trace is shown as far as it can be read.
    """
    from fd_core.cli.trace_page.pack import page
    from fd_core.config.outputs import write_whole
    from fd_core.engine.tracing.perfetto import perfetto_json
    from fd_core.engine.tracing.reader import read_trace

    suffix = ".html" if written == "html" else ".perfetto.json"
    target = output if output is not None else file.with_suffix(suffix)
    if target.resolve() == file.resolve():
        raise ConfigError("the output would replace the trace", field="--output", hint="choose another file")
    read = read_trace(file, last)
    content = page(read, file.name).encode() if written == "html" else perfetto_json(read)
    write_whole(target, content, "--output")
    for problem in read.problems:
        print(f"note: {problem}")
    for summary in (_phases_summary(read), _kv_summary(read)):
        if summary:
            print(summary)
    print(f"{target}: {len(read.positions):,} steps, {len(content) / 1e6:.1f} MB")


def _phases_summary(read: TraceContents) -> str:
    from fd_core.types import PHASE_NAMES

    entries = [entry.phases or () for position in read.positions for entry in position.line.finished]
    timed = [phases for phases in entries if len(phases) == len(PHASE_NAMES)]
    if not timed:
        return ""
    means = [sum(column) / len(timed) / 1e6 for column in zip(*timed, strict=True)]
    waits = sorted(zip(means[1:], PHASE_NAMES[1:], strict=True), key=lambda each: -each[0])
    shown = ", ".join(f"{name} {mean:.3f} s" for mean, name in waits if mean > 0) or "nothing"
    return f"{len(timed):,} requests: mean time computing {means[0]:.3f} s, waiting for {shown}"


def _kv_summary(read: TraceContents) -> str:
    lines = [position.line for position in read.positions]
    loads = [load for line in lines for load in line.loads]
    saves = [save for line in lines for save in line.saves]
    declined = sum(not decision.load for line in lines for decision in line.decisions)
    if not (loads or saves or declined):
        return ""
    loaded, wanted = sum(load.loaded for load in loads), sum(load.blocks for load in loads)
    host = sum(load.from_host for load in loads)
    took = sum(load.ended - load.began for load in loads) / 1e6
    saved = sum(save.saved for save in saves)
    return (
        f"KV outside the device: {len(loads):,} loads transferred {loaded:,} of {wanted:,} blocks, {host:,} from host "
        f"memory, in {took:.3f} s; {declined:,} loads were declined in favour of recomputing; {saved:,} blocks were "
        "saved"
    )
