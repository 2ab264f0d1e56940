from __future__ import annotations

import os
from importlib.util import find_spec

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Triton reads this when its kernels are defined. Without a GPU they run in its interpreter.
    if config.getoption("-m") != "hardware":
        os.environ["TRITON_INTERPRET"] = "1"
        if find_spec("triton") is not None:
            from interpreting import hasten

            hasten()
