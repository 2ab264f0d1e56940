"""The cases of a kit as values, for use in other test suites."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fd_core.deprecations import old_attributes
from fd_core.testing.axes import parts


@dataclass(frozen=True)
class SuiteCase:
    """A test of a kit with its parameters."""

    section: str
    function: Callable[..., None]
    parameters: dict[str, Any]

    def __str__(self) -> str:
        values = "-".join(str(getattr(value, "name", value)) for value in self.parameters.values())
        name = f"{self.section}:{self.function.__name__}"
        return f"{name}[{values}]" if values else name

    @property
    def rules(self) -> tuple[str, ...]:
        marks = [mark for mark in getattr(self.function, "pytestmark", []) if mark.name == "law"]
        return tuple(rule for mark in marks for rule in mark.args)

    def run(self, **fixtures: Any) -> None:
        """Run it with the fixtures in its signature. Raises `InvariantViolated` with the rule, or skips the test."""
        names = self.function.__code__.co_varnames[: self.function.__code__.co_argcount]
        self.function(**self.parameters, **{name: fixtures[name] for name in names if name in fixtures})


def cases_of(modules: Iterable[ModuleType]) -> Iterator[SuiteCase]:
    """Yield the cases of a suite, module by module."""
    for module in modules:
        section = module.__name__.rpartition(".test_")[2]
        for name, function in vars(module).items():
            if not name.startswith("test_") or function.__module__ != module.__name__:
                continue
            marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name in ("parametrize", "fd_cases")]
            for values in itertools.product(*map(_parameters, reversed(marks))):
                yield SuiteCase(section, function, {name: value for part in values for name, value in part.items()})


def _parameters(mark: Any) -> list[dict[str, Any]]:
    """Return the arguments of a mark `parametrize` or `fd_cases`, by name."""
    if mark.name == "fd_cases":
        return [{"case": case} for part in mark.args for case in parts.cases_of(part)[0]]
    names, values = mark.args[:2]
    rows = [
        value.values if hasattr(value, "marks") else (value,) if isinstance(names, str) else value for value in values
    ]
    return [dict(zip((names,) if isinstance(names, str) else names, row, strict=True)) for row in rows]


__getattr__ = old_attributes(__name__)
