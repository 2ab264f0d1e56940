from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from extent import everything

SLOWEST = ("test_kit.py", "test_attention_kernels.py", "test_products.py")
"""Files that begin first."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "at_length: repeats another test with other numbers; runs with FD_GPU_ALL=1")
    # Processes of tests import these modules, and the package next to them, which may not be the installed one.
    paths = Path(__file__).parent, Path(__file__).parents[1], *filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    # Triton reads this when its kernels are defined. Without a GPU they run in its interpreter.
    if config.getoption("-m") != "hardware":
        os.environ["TRITON_INTERPRET"] = "1"
        if find_spec("triton") is not None:
            from interpreting import hasten

            hasten()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that workers end together; deselect the long tests in a sample."""
    items.sort(key=lambda item: item.path.name not in SLOWEST)
    if not everything():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("at_length")])
        items[:] = [item for item in items if item.get_closest_marker("at_length") is None]


def pytest_collection_finish() -> None:
    """Exclude the objects that are loaded by now from later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free the excluded objects at exit."""
    gc.unfreeze()
