"""The entrance of `fdcore`."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Final

from fd_core.cli.report import interrupts_end_it, tells_old_names

__all__ = ["main"]

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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
        try:
            command()
        finally:
            if sys.stdout is not None:  # closed by whoever started it
                sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has gone; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        print(f"fdcore: the output cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is not tried again at the end
        sys.exit(1)
