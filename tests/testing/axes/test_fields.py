"""Every field of a contract is varied by an axis of a kit, or excused with a reason."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest

from fd_core.ops import contract
from fd_core.testing import axes as package

TYPES = (
    contract.Experts,
    contract.Heads,
    contract.HostStep,
    contract.KVShape,
    contract.Lora,
    contract.Norm,
    contract.PenaltyInput,
    contract.Rope,
    contract.SampleInput,
    contract.StepInput,
)
MODULES = [
    importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)
]
PARTS = [part for module in MODULES for part in vars(module).values() if type(part).__name__ == "Part"]
VARIED = {field for part in PARTS for axis in part.axes for field in axis.fields}
EXCUSED = {name: reason for module in MODULES for name, reason in getattr(module, "EXCUSED", {}).items()}


def fields_of(cls: type) -> list[str]:
    names = getattr(cls, "__struct_fields__", None) or [field.name for field in dataclasses.fields(cls)]
    return [f"{cls.__name__}.{name}" for name in names]


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_every_field_is_varied_or_excused(cls):
    assert [name for name in fields_of(cls) if name not in VARIED and name not in EXCUSED] == []


def test_axes_and_excuses_name_fields_that_exist():
    known = {name for cls in TYPES for name in fields_of(cls)}
    assert (VARIED | EXCUSED.keys()) - known == set()
    assert VARIED & EXCUSED.keys() == set()
    assert all(EXCUSED.values())
