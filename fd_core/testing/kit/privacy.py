"""Files, folders, sockets and shared memory that a plugin creates, and that other users of the machine may open."""

from __future__ import annotations

import bz2
import gzip
import io
import logging
import lzma
import os
import re
import shutil
import stat
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from fd_core.testing.kit.law import require
from fd_core.testing.kit.processes import resource_snapshot

_OTHERS: Final = 0o077
_MAY_WRITE: Final = 0o022
_PATHS: Final = {"os.mkdir": (0,), "os.rename": (1,), "os.link": (1,), "sqlite3.connect": (0,)}
"""Positions of the arguments that name something new, by event."""
_COMMANDS: Final = {"subprocess.Popen": 2, "os.posix_spawn": 2, "os.exec": 2, "os.spawn": 3, "os.system": 1}
"""Number of arguments before the variables, which only the new process can read, by event."""
_PART: Final = 8
"""Bytes of a value that no log shows."""
_MOST_LINES: Final = 256
"""Lines of a log at its usual level in thousands of calls."""
_ZIPPED: Final = b"PK\3\4"
_CHUNK: Final = 1 << 20
_NOTES: Final = list[Callable[[str, tuple[Any, ...]], None]]()
"""Functions that are called with audit events."""


@contextmanager
def audited(note: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call a function with each audit event of this process, in the thread that raises it."""
    _watch()
    _NOTES.append(note)
    try:
        yield
    finally:
        _NOTES.remove(note)


@cache
def _watch() -> None:
    def note_all(event: str, arguments: tuple[Any, ...]) -> None:
        for note in _NOTES:
            note(event, arguments)

    sys.addaudithook(note_all)  # which cannot be removed


class _Created(Collection[Path]):
    """Paths that are text until they are read.

    `Path` interns the parts of each, and when the table of interned strings grows, at any name, it takes some MB, which
    would count as memory of the plugin.
    """

    def __init__(self) -> None:
        self.names = dict[str, None]()

    def __contains__(self, path: object) -> bool:
        return str(path) in self.names

    def __iter__(self) -> Iterator[Path]:
        return map(Path, [*self.names])

    def __len__(self) -> int:
        return len(self.names)


@contextmanager
def created_paths() -> Iterator[Collection[Path]]:
    """Yield the files, folders and sockets that the process has created since, which may be gone again."""
    made = _Created()
    with audited(partial(_note, made.names)):
        yield made


@contextmanager
def kept_out_of_logs(*values: bytes, ids: Sequence[int] = ()) -> Iterator[None]:
    """Fail if a record of a log, also one for debugging, shows a part of a value, as text, as digits or escaped.

    `ids` are token ids that follow each other in a text, which no file that is created within may contain either. What
    Python prints to standard output and error is in the log of a server as well, which would grow with each call.
    """
    root, handler, printed, found = logging.getLogger(), logging.Handler(), io.StringIO(), Counter[str]()
    parts = [part for value in values for part in (value[:_PART], value[-_PART:]) if len(part) == _PART]
    forms = {re.escape(form) for part in parts for form in (part.hex(), repr(part)[2:-1], part.decode("latin-1"))}
    ways = {"a part of what it was given": "|".join(forms), "token ids": r"\D+".join(map(str, ids))}
    shown = {what: re.compile(way) for what, way in ways.items() if way}

    def note(line: str, level: int = logging.INFO) -> None:  # keeps none: the memory of a plugin is measured
        found["lines"] += level >= logging.INFO
        found.update(what for what, way in shown.items() if way.search(line))

    handler.emit = lambda record: note(record.getMessage(), record.levelno)  # type: ignore[method-assign]
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with redirect_stdout(printed), redirect_stderr(printed), created_paths() as made:
            yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
    for line in printed.getvalue().splitlines():
        note(line)
    for what in shown:
        require(not found[what], "8", f"{found[what]} lines of logs, or printed ones, show {what}")
    often = "for what happens in each call, log the first one, or for debugging only"
    require(
        found["lines"] <= _MOST_LINES, "8", f"it logs or prints {found['lines']:,} lines at the usual level; {often}"
    )
    packed = (re.escape(struct.pack(f"<{len(ids)}{kind}", *ids)) for kind in "iq")
    written = re.compile(b"|".join((ways["token ids"].encode(), *packed)))
    wrong = [str(path) for path in made if ids and path.is_file() and written.search(contents_of(path))]
    require(not wrong, "8", f"files hold token ids, which are prompts of all tenants: {', '.join(wrong)}")


@contextmanager
def hidden_from_other_users(folder: Path, *secrets: bytes, there: Sequence[Path] = ()) -> Iterator[None]:
    """Fail if another user may open what was created within, and is there at the end, with the usual umask of 022.

    `folder` is that of pytest, which is private, although folders of users are not: it protects nothing in it. With
    `secrets`, only files that contain one of them count, and commands of new processes, which all users can list.
    Folders that are `there` before protect what is in them once their mode is changed.
    """
    before, mask, commands = set(open_paths()), os.umask(0o022), list[str]()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _COMMANDS:
            commands.append(repr(arguments[: _COMMANDS[event]]))

    try:
        with created_paths() as made, audited(note):
            yield
        paths = [*made, *(path for path in open_paths() if path not in before)]
    finally:
        os.umask(mask)
    listed = any(secret.decode("latin-1") in command for command in commands for secret in secrets)
    require(not listed, "8", "the command of a new process, which all users can list, has a secret; pass a variable")
    private = {path for path in (*made, *there) if _mode(path) & _OTHERS == 0}
    for path in dict.fromkeys(paths):
        mode, ways = _mode(path), [each for each in path.parents if each in private or not _is_around(each, folder)]
        if any(stat.S_ISDIR(_mode(each)) and _mode(each) & _OTHERS == 0 for each in ways):
            continue
        shown = f"{path} has the mode {stat.S_IMODE(mode):o}, with a umask of 022: other users of the machine may"
        if stat.S_ISDIR(mode):
            require(mode & _MAY_WRITE == 0, "8", f"{shown} write there; create it with mode 700")
        elif (stat.S_ISSOCK(mode) and not secrets) or (stat.S_ISREG(mode) and _holds(path, secrets)):
            require(mode & _OTHERS == 0, "8", f"{shown} open it; create it in a folder of mode 700, or with mode 600")


def hidden_in_any_folder(folder: Path, *secrets: bytes) -> Iterator[AbstractContextManager[None]]:
    """Yield `hidden_from_other_users`, and again where the outermost folders that were made within are there before.

    A user makes them with the usual mode, which a plugin that creates a missing folder only does not change.
    """
    with created_paths() as made:
        yield hidden_from_other_users(folder, *secrets)
    folders = {path for path in made if path.is_dir()}
    outermost = [path for path in folders if folders.isdisjoint(path.parents)]
    for path in outermost:
        shutil.rmtree(path)
        path.mkdir()
        path.chmod(0o755)
    if outermost:
        yield hidden_from_other_users(folder, *secrets, there=outermost)


def _is_around(path: Path, folder: Path) -> bool:
    return path in (folder, *folder.parents) or folder in path.parents


def _holds(path: Path, secrets: Sequence[bytes]) -> bool:
    if not secrets:
        return path.stat().st_size > 0
    contents = contents_of(path)
    return any(secret in contents for secret in secrets)


def contents_of(path: Path) -> bytes:
    """Return the bytes of a file, decompressed if it is compressed, as far as it was written."""
    found = path.read_bytes()
    if found.startswith(_ZIPPED):
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            return b"".join(map(archive.read, archive.namelist()))
    for opened in (gzip.open, bz2.open, lzma.open):
        read = bytearray()
        with suppress(OSError, EOFError, lzma.LZMAError, zlib.error), opened(path) as file:
            while part := file.read1(_CHUNK):
                read += part
        if read:
            return bytes(read)
    return found


def _mode(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_mode
    return 0


def open_paths() -> Iterator[Path]:
    """Yield what this process has open or mapped, which extensions may have created."""
    found = resource_snapshot()
    yield from (Path(name) for name in (*found.descriptors, *found.mapped) if name.startswith(("/dev/shm/", "/tmp/")))  # noqa: S108


def _note(made: dict[str, None], event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT:
        _add(made, arguments[0])
    elif event == "socket.bind":
        _add(made, arguments[1])
    for at in _PATHS.get(event, ()):
        _add(made, arguments[at], arguments[-1])


def _add(made: dict[str, None], name: Any, folder: Any = -1) -> None:
    """Note a path, in the folder of a descriptor if there is one."""
    if not isinstance(name, str | bytes | os.PathLike):
        return
    text = os.fsdecode(name)
    if "__pycache__" in text or text[:1] in ("", "\0", ":"):
        return
    with suppress(OSError):
        of_descriptor = isinstance(folder, int) and folder >= 0
        base = os.readlink(f"/proc/self/fd/{folder}") if of_descriptor else os.getcwd()  # noqa: PTH109, PTH115
        path = os.path.join(base, text)  # noqa: PTH118 - see `_Created`
        if not os.path.isdir(path):  # noqa: PTH112 - which was there before
            made[path] = None
