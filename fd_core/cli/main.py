"""Entry point of `fdcore`."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from typing import Any, Final

from fd_core.cli.report import interrupts_end_it, print_usage_error, show_deprecations
from fd_core.errors import ConfigError

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Placeholder of a byte that cannot be decoded."""
_STDERR: Final = 2
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _undecodable() -> str | None:
    """Return the argument or variable with bytes that are not UTF-8; its value may be a secret."""
    given = {f"argument {place}": word for place, word in enumerate(sys.argv[1:], 1)}
    given |= {name: value for name, value in os.environ.items() if name.startswith("FD_")}
    return next((name for name, text in given.items() if _SURROGATE.search(text)), None)


class _Messages(io.FileIO):
    """Standard error, to which writes never fail: a full disk of logs, or a closed pipe, must not end a server."""

    def write(self, data: Any, /) -> int:
        """Write as much as possible."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _secure_output() -> None:
    """Let no message end the command, and let no other file become a standard stream that the parent closed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is sys.__stderr__:
        encoding = None if sys.stderr is None else sys.stderr.encoding
        messages: Any = _Messages(_STDERR, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(messages, encoding, "backslashreplace", line_buffering=True, write_through=True)


def main() -> None:
    """Run the command line."""
    _secure_output()
    if (undecodable := _undecodable()) is not None:
        print(f"fdcore: {undecodable} is not UTF-8; rename the file or folder, or use a symbolic link", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    with interrupts_end_it():
        import typer
        from typer.main import get_command

        from fd_core.cli.app import assemble

        command = get_command(assemble(*sys.argv[1:2]))
        usage_error: type[BaseException] = next(
            each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
        )
        show_deprecations()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows replacement characters
    try:
        try:
            ended = command(prog_name="fdcore", standalone_mode=False)
        except usage_error as error:
            ended = print_usage_error(error)
        finally:
            if sys.stdout is not None:  # None if the parent closed it
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output, such as `head`, has exited; no further output is possible.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        print(f"fdcore: cannot write the output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # buffered output is not written again at exit
        sys.exit(1)
    sys.exit(ended)
