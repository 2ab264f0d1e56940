"""The cases of the scheduler kit as values, for a test suite of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from fd_core.testing.requirements import lacks
from fd_core.testing.schedulers.suite import test_blocks, test_budget, test_golden, test_signals, test_storage
from fd_core.testing.schedulers.target import SchedulerTarget

__all__ = ["QUICK_EXAMPLES", "KitCase", "kit_cases"]

QUICK_EXAMPLES: Final = 20
"""Random sequences of calls that take some seconds."""
_SECTIONS: Final[tuple[ModuleType, ...]] = (test_signals, test_budget, test_blocks, test_golden, test_storage)


@dataclass(frozen=True)
class KitCase:
    """A test of the kit with its parameters."""

    section: str
    function: Callable[..., None]
    parameters: dict[str, Any]

    def __str__(self) -> str:
        values = "-".join(str(getattr(value, "name", value)) for value in self.parameters.values())
        name = f"{self.section}:{self.function.__name__}"
        return f"{name}[{values}]" if values else name

    @property
    def rules(self) -> tuple[str, ...]:
        """Rules of the law that it looks at."""
        marks = [mark for mark in getattr(self.function, "pytestmark", []) if mark.name == "law"]
        return tuple(rule for mark in marks for rule in mark.args)

    def check(self, target: SchedulerTarget, examples: int = QUICK_EXAMPLES) -> None:
        """Run it. Raises `LawBroken` with the rule, or skips the running test, with the reason."""
        if self.section == "storage" and "storage" in target.lacks:
            lacks(target.lacks["storage"])
        more = {"examples": examples} if "examples" in self.function.__code__.co_varnames else {}
        self.function(target=target, **self.parameters, **more)


def kit_cases() -> list[KitCase]:
    """Return all cases, section by section."""
    return [case for module in _SECTIONS for case in _cases_of(module)]


def _cases_of(module: ModuleType) -> Iterator[KitCase]:
    section = module.__name__.rpartition(".test_")[2]
    for name, function in vars(module).items():
        if not name.startswith("test_") or function.__module__ != module.__name__:
            continue
        marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        for values in itertools.product(*(_parameters(*mark.args) for mark in reversed(marks))):
            yield KitCase(section, function, {name: value for part in values for name, value in part.items()})


def _parameters(names: str | tuple[str, ...], values: list[Any]) -> list[dict[str, Any]]:
    if isinstance(names, str):
        return [{names: value} for value in values]
    return [dict(zip(names, value, strict=True)) for value in values]
