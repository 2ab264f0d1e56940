"""Reading messages in a terminal: editing and history of lines, and messages of several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_QUOTES: Final = '"""'
_PROMPT: Final = "> "
_GOES_ON: Final = ". "
_KEPT_LINES: Final = 1000


def typed_messages() -> Iterator[str]:
    """Yield messages until the input ends or Ctrl-C is pressed where one is awaited.

    A line is a message. One that ends in a backslash goes on in the next line; one that begins with three quotes ends
    where three quotes end a line. Ctrl-C within a message of several lines forgets it.
    """
    while True:
        try:
            first = _line(_PROMPT)
        except EOFError:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return
        try:
            yield _whole(first)
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _whole(line: str) -> str:
    """Return the message that begins with a line; the end of the input ends it."""
    lines = [line]
    with contextlib.suppress(EOFError):
        if line.startswith(_QUOTES):
            lines[0] = line.removeprefix(_QUOTES)
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(_line(_GOES_ON))
            lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(_line(_GOES_ON))
    return "\n".join(lines)


def _line(prompt: str) -> str:
    if not sys.stdin.isatty():
        return input()
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # what goes into a file or a pipe is answers
    return input()


@contextlib.contextmanager
def kept_history(path: Path | None) -> Iterator[None]:
    """Let arrow keys edit lines and bring back earlier ones, on a terminal.

    With a path, what is typed within the block is added to that file, which only its owner may read, and what was
    typed in earlier sessions is there. A file that cannot be used is done without.
    """
    try:
        import readline
    except ImportError:  # not everywhere part of Python
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.set_history_length(_KEPT_LINES)
            readline.read_history_file(path)
    known = readline.get_current_history_length()
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                readline.append_history_file(readline.get_current_history_length() - known, path)
