"""Availability checks of backends that do not import a framework into this process."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from typing import Any, Final

from fd_core.errors import PluginError

_MARK: Final = "fd_core probe:"
_PATIENCE: Final = 60.0
"""Timeout in seconds; the import of a framework alone takes one to ten."""


def missing(*modules: str) -> list[str]:
    """Return the modules that are not installed; imports none."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def run_isolated(question: str, *, slow: str, failed: str) -> tuple[Any, str]:
    """Run Python code that sets `answer` in a subprocess, which a broken driver may crash.

    Returns the answer, or None and the reason: `slow` on timeout, or `failed` and the cause.
    """
    code = f"import json\n{question}\nprint({_MARK!r}, json.dumps(answer))"
    # -P: a file `paddle.py` in the working folder is not Paddle.
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return None, slow.format(seconds=f"{_PATIENCE:.0f} s")
    for line in ended.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK)), ""
    errors = ended.stderr.strip().splitlines()
    return None, f"{failed}: {errors[-1] if errors else f'exit status {ended.returncode}'}"


def import_pack(backend: str, module: str, *, needs: str, hint: str) -> None:
    """Import the module of a backend's pack. Raises `PluginError` with the installation hint."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise PluginError(f"the {backend} backend needs {needs}: {error}", field="--backend", hint=hint) from error
