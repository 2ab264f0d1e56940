"""Imports modules of the core with an edit, in the process of a trial and in those that it starts."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from dataclasses import astuple
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

from tests.testing.mutation.edits import Edit

ROOT: Final = Path(__file__).parents[3]
_ORACLE: Final = "fd_core.ops.numpy"
_COPY: Final = "fd_mutant"
"""Package of the edited pack: the oracle of the kit stays what it is."""


def path_of(module: str) -> Path:
    """Return the file of a module of the core."""
    return ROOT / (module.replace(".", "/") + ".py")


def install() -> None:
    """Import with the edit of the trial that started this process."""
    module, edit = json.loads(os.environ["FD_EDIT"])
    sys.meta_path.insert(0, EditedModules(module, edit and Edit(*edit)))


class EditedModules(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds one module of the core with an edit, and the copy of the oracle's pack."""

    def __init__(self, module: str, edit: Edit | None) -> None:
        self._module, self._edit = module, edit

    def encoded(self) -> str:
        """Return module and edit for `install`."""
        return json.dumps((self._module, self._edit and astuple(self._edit)))

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        edited = name == self._module and not name.startswith(_ORACLE)
        if not edited and name.partition(".")[0] != _COPY:
            return None
        return importlib.util.spec_from_loader(name, self, origin=self._file_of(name))

    def is_package(self, name: str) -> bool:
        return name == _COPY

    def get_source(self, name: str) -> str:
        if name == _COPY:
            return ""
        source = Path(self._file_of(name)).read_text()
        if self._edit is not None and name.replace(_COPY, _ORACLE) == self._module:
            source = self._edit.applied(source)
        return source.replace(f"{_ORACLE}.", f"{_COPY}.") if name.startswith(_COPY) else source

    def get_code(self, name: str) -> CodeType:
        code: CodeType = compile(self.get_source(name), self._file_of(name), "exec")
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._file_of(module.__name__)
        super().exec_module(module)

    @staticmethod
    def _file_of(name: str) -> str:
        return str(path_of(name.replace(_COPY, _ORACLE)))
