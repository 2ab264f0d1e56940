"""Scripts of `examples/` as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Yield an importer of `FOLDER/NAME`, with its folder on the path like a script; unload its modules at the end."""
    before = set(sys.modules)

    def imported(path: str) -> ModuleType:
        monkeypatch.syspath_prepend(EXAMPLES / Path(path).parent)
        return importlib.import_module(Path(path).name)

    yield imported
    for name in set(sys.modules) - before:
        if str(EXAMPLES) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
