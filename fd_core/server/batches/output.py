"""The file of answers of a run that may be interrupted: whole lines only, and complete or not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Final

import msgspec

from fd_core.errors import ConfigError
from fd_core.server.batches.lines import BatchAnswer, as_line

_BLOCK_BYTES: Final = 1 << 16

_decoder = msgspec.json.Decoder(BatchAnswer)


class AnswerFile(AbstractContextManager["AnswerFile"]):
    """Answers are appended to `PATH.partial`, which becomes `PATH` when the run is over.

    A run that is begun again finds the answers of the one before in `known`; a line that was being written when that
    one ended is cut off.
    """

    def __init__(self, path: Path, account: Callable[[int], None] = lambda _: None) -> None:
        """`account` is called before the file grows, with the bytes; it may raise to prevent that.

        Raises `ConfigError` if there is a file already, or one that is no output of a batch.
        """
        self.path = path
        self.known: dict[str, BatchAnswer] = {}
        """By id; the answers themselves are left out."""
        self._account = account
        self._partial = path.with_name(f"{path.name}.partial")
        if path.exists():
            raise ConfigError(f"{path} exists already", field="--output", hint="name another file, or delete it")
        try:
            self._file = self._partial.open("a+b", buffering=0)
            self._file.seek(0)
            end = 0
            for line in self._file:
                if not line.endswith(b"\n"):
                    break
                found = _decoder.decode(line)
                if found.response is not None:
                    found.response.body = msgspec.Raw(b"null")
                self.known[found.id] = found
                end += len(line)
            self._file.truncate(end)
            self.size = end
        except OSError as error:
            raise ConfigError(f"cannot write {self._partial}: {error.strerror}", field="--output") from error
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self._partial} is not the output of an interrupted run", field="--output", hint="delete it"
            ) from error

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, answer: BatchAnswer) -> None:
        """Append an answer. Raises `OSError` if it could not be written whole, and leaves nothing of it."""
        line = as_line(answer)
        self._account(len(line))
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # else the line is cut off when the file is opened again, or complete
                self._file.truncate(self.size)
                self._account(-len(line))
            raise
        self.size += len(line)

    def sync(self) -> None:
        """Have the disk write what is there."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Make the file complete: it appears under its own name."""
        self.sync()
        self._file.close()
        self._partial.replace(self.path)


def cut_torn_line(file: IO[bytes]) -> int:
    """Cut off what follows the last whole line, which a process that died or a disk that failed may leave."""
    end = file.seek(0, os.SEEK_END)
    begin = end
    while begin:
        before, begin = begin, max(0, begin - _BLOCK_BYTES)
        file.seek(begin)
        if (found := file.read(before - begin).rfind(b"\n")) >= 0:
            begin += found + 1
            break
    if begin < end:
        file.truncate(begin)
    return begin
