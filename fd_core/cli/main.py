"""The entrance of `fdcore`."""

from __future__ import annotations

import sys

from fd_core.cli.report import interrupts_end_it, tells_old_names

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    with interrupts_end_it():
        from fd_core.cli.app import app
    tells_old_names()
    try:
        app()
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has gone; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(1)
