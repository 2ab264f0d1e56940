"""What a mutant is, and how it is applied to a copy of the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DoesNotApply", "Edit", "Mutant", "NotApplicable", "mutant"]


class DoesNotApply(LookupError):
    """The text that a mutant replaces does not occur exactly once: the mutant has to follow the code."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement in one file, named below `fd_core/`."""

    file: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Change the file in `package`. Raises `DoesNotApply` unless `old` occurs exactly once."""
        path = package / self.file
        source = path.read_text()
        if (count := source.count(self.old)) != 1:
            raise DoesNotApply(f"{self.file} has {count} places, not one, with this text:\n{self.old}")
        path.write_text(source.replace(self.old, self.new))


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault with a name and the law of the protocol that it breaks."""

    name: str
    law: str
    edits: tuple[Edit, ...]

    def apply(self, package: Path) -> None:
        """Put the fault into the copy of fd_core at `package`."""
        for edit in self.edits:
            edit.apply(package)


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A fault that the protocol names but that has no place in the code yet."""

    name: str
    law: str
    reason: str


def mutant(name: str, law: str, *places: tuple[str, str, str]) -> Mutant:
    """Make a mutant of (file, old text, new text) triples."""
    return Mutant(name, law, tuple(Edit(*place) for place in places))
