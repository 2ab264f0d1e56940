"""Files of workloads, read line by line within limits. Errors name file, line, field and limit."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from fd_core.config.sizes import format_size
from fd_core.errors import ConfigError

MAX_FILE_BYTES: Final = 1 << 30
MAX_LINES: Final = 20_000_000
MAX_LINE_BYTES: Final = 1 << 24
_MAX_ROWS: Final = 1 << 20


def opened(path: Path, most: int | None = None) -> BinaryIO:
    """Open a file to read. Raises `ConfigError` if it cannot be, or has more than `most` or `MAX_FILE_BYTES` bytes."""
    try:
        if not path.is_file():
            what = f"{path} is not a regular file" if path.exists() else f"the file {path} does not exist"
            raise wrong_file(what, "use an existing file")
        size, limit = path.stat().st_size, MAX_FILE_BYTES if most is None else most
        if size > limit:
            raise wrong_file(
                f"{path} has {format_size(size)}, which exceeds the limit of {format_size(limit)}", "split it"
            )
        return path.open("rb")
    except OSError as error:
        raise wrong_file(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, with their numbers from 1. Raises `ConfigError`."""
    with opened(path) as file:
        for number in range(1, MAX_LINES + 2):
            raw = file.readline(MAX_LINE_BYTES + 1)
            if not raw:
                return
            if len(raw) > MAX_LINE_BYTES:
                raise wrong_line(path, number, f"is longer than {format_size(MAX_LINE_BYTES)}")
            if number == 1:
                raw = raw.removeprefix(BOM_UTF8)
            if raw.strip():
                yield number, raw
    raise wrong_file(f"{path} has more than {MAX_LINES:,} lines", "split it, or limit it by requests=N")


def wrong_file(what: str, hint: str | None = None) -> ConfigError:
    """Return the error of an unusable file."""
    return ConfigError(what, field="file", hint=hint)


def wrong_line(path: Path, number: int, phrase: str) -> ConfigError:
    """Return the error of an invalid line."""
    return wrong_file(f"{path}, line {number:,}: {phrase}")


def number_rows(path: Path, columns: int, most: float) -> npt.NDArray[np.float64]:
    """Return float64[lines, columns] of a file with `columns` numbers, 0 to `most`, in each line. Raises `ConfigError`.

    Commas or blanks separate them; lines that begin with `#` are skipped.
    """
    rows: list[list[float]] = []
    for number, raw in lines_of(path):
        if raw.startswith(b"#"):
            continue
        try:
            row = [float(word) for word in raw.replace(b",", b" ").split(None, columns)]
        except ValueError:
            row = []
        if len(row) != columns or not all(0 <= value <= most for value in row):
            raise wrong_line(path, number, f"does not have {columns} numbers from 0 to {most:,.10g}")
        if len(rows) == _MAX_ROWS:
            raise wrong_line(path, number, f"exceeds the limit of {_MAX_ROWS:,} lines with numbers")
        rows.append(row)
    if not rows:
        raise wrong_file(f"{path} has no numbers", "write one number per line")
    return np.array(rows)
