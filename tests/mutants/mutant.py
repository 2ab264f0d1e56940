"""A mutant, and its application to a copy of the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DoesNotApply", "Edit", "Mutant", "NotApplicable", "mutant"]


class DoesNotApply(LookupError):
    """The text that a mutant replaces does not occur exactly once: the mutant has to follow the code."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement in one file; the path is relative to `fd_core/`."""

    file: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Change the file in `package`. Raises `DoesNotApply` unless `old` occurs exactly once."""
        path = package / self.file
        source = path.read_text()
        if (count := source.count(self.old)) != 1:
            raise DoesNotApply(f"{self.file} contains this text {count} times, expected once:\n{self.old}")
        path.write_text(source.replace(self.old, self.new))


@dataclass(frozen=True, slots=True)
class Mutant:
    """A named fault and the invariant of the protocol that it violates."""

    name: str
    law: str
    edits: tuple[Edit, ...]

    def apply(self, package: Path) -> None:
        """Apply the fault to the copy of fd_core at `package`."""
        for edit in self.edits:
            edit.apply(package)


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A fault against the protocol that no code can have yet."""

    name: str
    law: str
    reason: str


def mutant(name: str, law: str, *edits: tuple[str, str, str]) -> Mutant:
    """Make a mutant of (file, old text, new text) triples."""
    return Mutant(name, law, tuple(Edit(*edit) for edit in edits))
