"""Names that were replaced still work, and each warns once with its replacement."""

from __future__ import annotations

import inspect
import re
import warnings
from importlib import import_module
from typing import Any

import pytest

from fd_core import deprecations
from fd_core.deprecations import OldNameWarning, accept_old_names

RENAMED = [(owner, old, new) for owner, names in deprecations._RENAMED.items() for old, new in names.items()]
CLASSES = [each for each in RENAMED if each[0].rpartition(".")[2][0].isupper()]
MODULES = [each for each in RENAMED if each not in CLASSES]


@pytest.fixture(autouse=True)
def no_earlier_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecations, "_warned", set())


def class_of(owner: str) -> type[Any]:
    module, _, name = owner.rpartition(".")
    found: type[Any] = getattr(import_module(module), name)
    return found


@pytest.mark.parametrize(("owner", "old", "new"), CLASSES)
def test_old_attribute_reads_the_new_one_and_warns_once(owner: str, old: str, new: str) -> None:
    cls = class_of(owner)
    holder = type("Holder", (), {old: vars(cls)[old], new: 7})()
    with pytest.warns(OldNameWarning, match=f"{old} was replaced .* use {new}") as warned:
        assert getattr(holder, old) == getattr(holder, old) == 7
    assert len(warned) == 1
    assert re.search(rf"\b{new}\b", inspect.getsource(cls)), "the new name exists"


@pytest.mark.parametrize(("module", "old", "new"), MODULES)
def test_old_module_attribute_is_the_new_one_and_warns_once(module: str, old: str, new: str) -> None:
    target, _, attribute = new.rpartition(".")
    with pytest.warns(OldNameWarning, match=f"{old} was replaced .* use {new}") as warned:
        found = [getattr(import_module(module), old) for _ in range(2)]
    assert found == [getattr(import_module(target), attribute)] * 2 and len(warned) == 1


def test_module_without_the_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonesuch'"):
        import_module("fd_core.backends.places").nonesuch  # noqa: B018 - the access raises


def test_override_under_the_old_name_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecations, "_RENAMED", {f"{__name__}.Base": {"old": "new"}})

    class Base:
        def new(self) -> str:
            return "base"

    Base.__qualname__ = "Base"
    base = accept_old_names(Base)
    with pytest.warns(OldNameWarning, match="use new") as warned:

        class Plugin(base):  # type: ignore[misc, valid-type]
            def old(self) -> str:
                return "plugin"

    assert (Plugin().new(), len(warned)) == ("plugin", 1)
    with warnings.catch_warnings(action="error", category=DeprecationWarning):
        assert Plugin().old() == "plugin"
