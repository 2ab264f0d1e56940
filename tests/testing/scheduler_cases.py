"""The cases of the scheduler kit, called in this process: what one of them says of a scheduler, or all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest

from fd_core.testing.schedulers.suite import test_blocks, test_budget, test_golden, test_signals, test_storage
from fd_core.testing.schedulers.target import SchedulerTarget

SECTIONS: tuple[ModuleType, ...] = (test_signals, test_budget, test_blocks, test_golden, test_storage)


@dataclass(frozen=True)
class Case:
    """A test of the kit with its parameters."""

    section: str
    function: Callable[..., None]
    parameters: dict[str, object]

    @property
    def name(self) -> str:
        values = "-".join(str(getattr(value, "name", value)) for value in self.parameters.values())
        name = f"{self.section}:{self.function.__name__}"
        return f"{name}[{values}]" if values else name

    @property
    def rules(self) -> tuple[str, ...]:
        marks = [mark for mark in getattr(self.function, "pytestmark", []) if mark.name == "law"]
        return tuple(rule for mark in marks for rule in mark.args)

    def run(self, target: SchedulerTarget, examples: int = 8) -> str | None:
        """Return why the scheduler fails, None if it passes or the case is left out."""
        if self.section == "storage" and "storage" in target.lacks:
            return None
        more = {"examples": examples} if "examples" in self.function.__code__.co_varnames else {}
        try:
            self.function(target=target, **self.parameters, **more)
        except pytest.skip.Exception:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, the case failed
            return f"{type(error).__name__}: {error}"
        return None


def all_cases() -> Iterator[Case]:
    for module in SECTIONS:
        section = module.__name__.rpartition(".test_")[2]
        for function in [each for name, each in vars(module).items() if name.startswith("test_")]:
            if function.__module__ != module.__name__:
                continue
            marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
            for values in itertools.product(*(_parameters(mark.args) for mark in reversed(marks))):
                yield Case(section, function, {name: value for part in values for name, value in part.items()})


def _parameters(arguments: tuple[object, ...]) -> list[dict[str, object]]:
    names, values = arguments
    if isinstance(names, str):
        return [{names: value} for value in values]
    return [dict(zip(names, value, strict=True)) for value in values]
