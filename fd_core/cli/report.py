"""Exit of a command: every error for users is one line on stderr, and the exit code identifies the kind of fault."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from fd_core.errors import ConfigError, FdError

STARTED: Final = time.monotonic()
"""Time at which the command began to run."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports it."""

_CONTROLS: Final = {**dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), "?"), 0x09: "\t", 0x0A: "\n", 0x0D: None}
"""Replacement of each control character; ends of lines are `\\n` alone."""

_TYPER_WORDS: Final = {
    r"^Invalid value for '(\S+?)': (?:Value error, )?Input should be (.*?)(?:, unable.*)?$": r"\1: expected \2",
    r"^Invalid value for '(\S+?)': (?:Value error, )?": r"\1: ",
    r"\. Did you mean (.*)\?$": r"; did you mean \1?",
    r"extra argument(?:\(s\)|s)? \((.*)\)": r"extra argument '\1'",
    r"\.$": "",
}
"""Patterns in messages of typer, and their form here."""


def reports_errors(function: Callable[..., None]) -> Callable[..., None]:
    """End a command with the exit code and the one-line message of the error that reached it."""

    import typer

    @functools.wraps(function)
    def command(**arguments: object) -> None:
        try:
            function(**{name: _expanded(name, value) for name, value in arguments.items()})
        except FdError as error:
            print_error(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            print("\nfdcore: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            from fd_core.plugins import blamed_on_file

            if (file_error := blamed_on_file(error)) is None:
                raise
            print_error(file_error)
            raise typer.Exit(file_error.exit_code) from None

    return command


def _expanded(name: str, value: object) -> object:
    """Return an argument; in a path, ~ is replaced, which shells leave unchanged in quotes and after =."""
    if not isinstance(value, Path) or not str(value).startswith("~"):
        return value
    from fd_core.config.paths import user_path

    return user_path(value, name)


@contextlib.contextmanager
def interrupts_end_it() -> Iterator[None]:
    """Let Ctrl-C end the process at once, as nothing is held while the block imports modules or builds commands."""

    def end(*_: object) -> None:
        os.write(2, b"\nfdcore: interrupted\n")
        os._exit(INTERRUPTED)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # another handler is installed, or it is ignored
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def outlive_hangups(key_file: str | None) -> None:
    """Ignore SIGHUP until the server installs its handler, which reloads the keys; only if there is a key file."""
    if key_file is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def show_deprecations() -> None:
    """Show warnings about deprecated names as one line; other warnings look as usual."""
    from fd_core.deprecations import OldNameWarning

    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, OldNameWarning):
            print(f"fdcore: {plain(str(message))}", file=sys.stderr)
        else:
            usual(message, category, *where, **more)

    warnings.showwarning = show


def print_error(error: FdError) -> None:
    """Print an error as one line: the field, the fault, the remedy."""
    print(f"fdcore: {describe(error)}", file=sys.stderr)


def print_usage_error(error: Any) -> int:
    """Print an error of typer like any other one, but the help of a group as it is. Return the exit code."""
    message = str(error.format_message())
    if error.ctx is not None and message == error.ctx.get_help():
        print(message, file=sys.stderr)
        return ConfigError.exit_code
    if nearest := getattr(error, "possibilities", None):
        message = f"{error.message}; did you mean {' or '.join(sorted(nearest))}?"
    for pattern, ours in _TYPER_WORDS.items():
        message = re.sub(pattern, ours, message)
    hint = None if error.ctx is None else f"run `{error.ctx.command_path} --help`"
    print_error(ConfigError(message[:1].lower() + message[1:], hint=hint))
    return ConfigError.exit_code


def describe(error: FdError) -> str:
    """Return the error as one line without control characters, which file names and servers may contain."""
    field = f"{error.field}: " if error.field and error.field not in error.message else ""
    return plain(f"{field}{error}")


def plain(text: str) -> str:
    """Return a text of unknown origin as one line that cannot control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def harmless(text: str) -> str:
    """Return a text of unknown origin with its lines unchanged, but without terminal control characters."""
    return text.translate(_CONTROLS)
