"""The router core is lightweight: it loads no framework, no server and no store."""

from __future__ import annotations

import subprocess
import sys

# cython_runtime: part of numpy 1.
LIGHT = {"fd_core", "msgspec", "numpy", "cython_runtime", "typing_extensions"}


def test_core_imports_nothing_heavy() -> None:
    code = (
        "import sys, fd_core.router.router, fd_core.router.policies\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name for name in answer.stdout.split() if not name.startswith("_")}
    assert loaded <= LIGHT
