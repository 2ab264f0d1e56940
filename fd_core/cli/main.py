"""The entrance of `fdcore`."""

from __future__ import annotations

import io
import sys

from fd_core.cli.report import interrupts_end_it, tells_old_names

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    with interrupts_end_it():
        from typer.main import get_command

        from fd_core.cli.app import app

        command = get_command(app)
        tells_old_names()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows the rest
    try:
        command()
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has gone; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(1)
