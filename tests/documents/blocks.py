"""Blocks of code in the documents, and the marks of those that nothing runs here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCUMENTS", "REASONS", "ROOT", "Block", "blocks_of", "name_of"]

ROOT = Path(__file__).parents[2]
DOCUMENTS = tuple(
    sorted(
        [
            *ROOT.glob("*.md"),
            *ROOT.glob("docs/**/*.md"),
            *ROOT.glob("examples/**/README.md"),
            *ROOT.glob("plugins/*/README.md"),
        ]
    )
)

REASONS = ("needs a GPU", "needs the network", "takes too long", "needs another machine", "is run by ")
"""Reasons allowed after `not run:`; the last one ends with the path of a test."""

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+?) -->\n+)?"  # the mark of this block
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"(?:\A|[Ss]ave this as )`(?P<file>[\w./-]+)`(?::|\.\s)")
"""Name of the block's file, in the paragraph before the block."""
_NAMED = re.compile(r"# (?P<file>[\w.-]+\.(?:toml|yaml|yml))\n")
"""First line of a block that is a file."""
_PAGE = re.compile(r"^<!-- every block here is run by (?P<test>\S+) -->$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document."""

    document: str
    """Path of the document from the top of the repository."""
    line: int
    """Line of its fence, from 1 on."""
    language: str
    text: str
    file: str | None
    """Name of the file that the block contains, from its first line or the paragraph before it."""
    why: str | None
    """Reason that it is not run here, from its mark or that of its page."""

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def name_of(document: Path) -> str:
    """Return the path of a document from the top of the repository."""
    return document.relative_to(ROOT).as_posix()


def blocks_of(document: Path) -> list[Block]:
    """Return the blocks of a document in their order."""
    text = document.read_text()
    page = _PAGE.search(text)
    whole = None if page is None else f"is run by {page['test']}"
    return [
        Block(
            document=name_of(document),
            line=text.count("\n", 0, found.start("indent")) + 1,
            language=found["language"],
            text=re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            file=_file(text[: found.start()], found["text"]),
            why=found["why"] or whole,
        )
        for found in _BLOCK.finditer(text)
    ]


def _file(before: str, text: str) -> str | None:
    found = _FILE.search(before.rstrip().rpartition("\n\n")[2]) or _NAMED.match(text)
    return None if found is None else found["file"]
