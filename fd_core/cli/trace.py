"""`fdcore trace`: what a run did, step by step, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fd_core.cli.report import reports_errors

__all__ = ["trace"]


@reports_errors
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `fdcore serve --trace FILE` wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="PAGE", help="Where the page goes.", show_default="FILE with the suffix .html"),
    ] = None,
    last: Annotated[int, typer.Option(metavar="N", min=1, help="Show the last N steps.")] = 100_000,
) -> None:
    """Render a trace as one HTML page that needs no network.

    It shows slots over time, budget, KV blocks, preemptions and returns, speculation, queue and step time. A trace that
    is cut off or damaged is shown as far as it can be read.
    """
    from fd_core.cli.trace_page.pack import page
    from fd_core.cli.trace_page.reader import read_trace
    from fd_core.errors import ConfigError

    target = output if output is not None else file.with_suffix(".html")
    if target.resolve() == file.resolve():
        raise ConfigError("the page would replace the trace", field="--output", hint="name another file")
    read = read_trace(file, last)
    try:
        target.write_text(page(read, file.name), encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot write {target}: {reason}", field="--output") from error
    for problem in read.problems:
        print(f"note: {problem}")
    print(f"{target}: {len(read.positions):,} steps, {target.stat().st_size / 1e6:.1f} MB")
