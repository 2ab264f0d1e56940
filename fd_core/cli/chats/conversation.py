"""A conversation in the terminal: reading messages, and the commands that change, save and restore it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fd_core.config.paths import user_path
from fd_core.errors import ConfigError

Message = dict[str, Any]

HELP: Final = '''\
/reset        forget the conversation
/system TEXT  set the system message; without TEXT, show it
/save FILE    write the conversation as JSON
/load FILE    continue a saved conversation
/help         show this help
/quit         quit, like Ctrl-D; Ctrl-C stops an answer
A line that ends in \\ continues on the next one; """ begins and ends a message of several lines.'''


class ChatHistory:
    """Messages of one conversation. A system message, if there is one, is the first and survives a reset."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system or None
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """Every message, as requests carry them."""
        start: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*start, *self._turns]

    def asked(self, text: str) -> list[Message]:
        """Return the messages with a question at their end, which is not stored."""
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, text: str, answer: str) -> None:
        """Store a question and its answer."""
        self._turns += ({"role": "user", "content": text}, {"role": "assistant", "content": answer})

    def command(self, line: str) -> str | None:
        """Run a command but `/quit`; return its reply, None for a message. Raises `ConfigError` for bad ones."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help":
                return HELP
            case "/reset":
                self._turns.clear()
                return "forgotten"
            case "/system":
                self.system = rest or self.system
                return f"system: {self.system or 'none'}"
            case "/save" | "/load":
                if not rest:
                    raise ConfigError(f"{name} requires a file name", field=name)
                path = user_path(rest, name)
                return self._save(path) if name == "/save" else self._load(path)
            case _ if name[1:].isalpha() and name.startswith("/"):
                raise ConfigError(
                    f"unknown command {name}", hint="/help lists the commands; put a space before / to send the line"
                )
        return None

    def _save(self, path: Path) -> str:
        messages = self.messages
        content = json.dumps({"messages": messages}, indent=1, ensure_ascii=False) + "\n"
        try:
            if path.exists():
                _read(path, "/save")  # another file is not overwritten
            path.write_bytes(content.encode())
        except (OSError, ValueError) as error:
            raise _unusable("/save", "write", path, error=error) from error
        return f"saved {len(messages)} messages in {path}"

    def _load(self, path: Path) -> str:
        messages = _read(path, "/load")
        first = messages[0] if messages else {}
        self.system = first["content"] if first.get("role") == "system" else None
        self._turns = messages if self.system is None else messages[1:]
        return f"loaded {len(messages)} messages from {path}"


def _read(path: Path, command: str) -> list[Message]:
    """Return the messages of a saved conversation. Raises `ConfigError` for the command that reads it."""
    messages: list[Message] = []
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise ConfigError(f"{path} is not a file", field=command)
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        valid = isinstance(messages, list) and all(
            isinstance(each["role"], str) and isinstance(each["content"], str) for each in messages
        )
    except OSError as error:
        raise _unusable(command, "read", path, error=error) from error
    except (ValueError, TypeError, LookupError, RecursionError):
        valid = False
    if not valid:
        raise ConfigError(f"{path} is not a saved conversation", hint="choose another file")
    return messages


def _unusable(command: str, what: str, path: Path, error: OSError | ValueError) -> ConfigError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(f"cannot {what} {path}: {reason.lower()}", field=command)


_QUOTES: Final = '"""'
_PROMPT: Final = "> "
_GOES_ON: Final = ". "


def typed_messages() -> Iterator[str]:
    """Yield messages, of one line or of several, until the input ends or Ctrl-C is pressed where one is awaited."""
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
    print(prompt, end="", file=sys.stderr, flush=True)  # only answers go into a file or a pipe
    return input()


@contextlib.contextmanager
def input_history(path: Path | None) -> Iterator[None]:
    """Let arrow keys edit lines and recall earlier ones; typed lines are added to `path`, if it is usable."""
    try:
        import readline
    except ImportError:  # missing on some platforms
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.set_history_length(1000)
            readline.read_history_file(path)
    known = readline.get_current_history_length()
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                readline.append_history_file(readline.get_current_history_length() - known, path)
