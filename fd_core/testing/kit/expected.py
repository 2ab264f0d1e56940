"""Expected failures: a file of tests and cases that are known to fail, each with a reason.

As the skips and xfails files of the Array API tests: a line is `PATTERN  # REASON`; empty lines and those that begin
with `#` are ignored. A pattern is the name of a test, with or without its section and parameters, in which `*` stands
for any text, or a case such as `layer:window=7`, which every case with these values matches. `coverage:FILE:SOURCE`
excuses code that no check executes, by the source of its first line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fd_core.config.paths import read_bounded
from fd_core.errors import ConfigError

if TYPE_CHECKING:
    from fd_core.testing.axes.parts import KitCase

_LINE: Final = re.compile(r"(?P<pattern>\S.*?)\s+#\s*(?P<reason>\S.*?)\s*")
_MAX_BYTES: Final = 2**20
FLAG: Final = "--expected-failures"
OF_COVERAGE: Final = "coverage:"
"""Beginning of patterns that are about code instead of tests."""


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """One line of the file."""

    pattern: str
    reason: str

    def __str__(self) -> str:
        return f"{self.pattern}  # {self.reason}"

    def matches(self, section: str, test: str, case: KitCase | None) -> bool:
        """Return True if the line is about a test, `test` with its parameters in brackets, or about its case."""
        if case is not None and self.pattern.startswith(f"{case.part.name}:"):
            return case.has(self.pattern.partition(":")[2])
        function = test.partition("[")[0]
        return any(map(self.is_glob_of, (test, function, f"{section}:{test}", f"{section}:{function}")))

    def is_glob_of(self, name: str) -> bool:
        """Return True if the pattern is `name`, where `*` stands for any text."""
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), name) is not None


def read_expected_failures(path: Path) -> list[ExpectedFailure]:
    """Parse the file. Raises `ConfigError` for a line without a reason, and if it cannot be read."""
    try:
        return list(_parsed(read_bounded(path, _MAX_BYTES, FLAG).decode()))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", field=FLAG) from None


def _parsed(text: str) -> Iterator[ExpectedFailure]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ConfigError(
                f"line {number}, {line.strip()!r}, has no reason", field=FLAG, hint="write PATTERN  # REASON"
            )
        yield ExpectedFailure(found["pattern"], found["reason"])
