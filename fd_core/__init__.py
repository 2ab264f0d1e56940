"""fd_core: an LLM serving engine whose backends, schedulers, KV stores and router policies are plugins.

Public names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fd_core.engine.async_llm import AsyncLLM
    from fd_core.engine.llm import LLM, Completion
    from fd_core.errors import FdError
    from fd_core.types import SamplingParams

__all__ = ["LLM", "AsyncLLM", "Completion", "FdError", "SamplingParams", "__version__"]

__version__ = "0.2.0"

_HOMES = {
    "AsyncLLM": "fd_core.engine.async_llm",
    "LLM": "fd_core.engine.llm",
    "Completion": "fd_core.engine.llm",
    "FdError": "fd_core.errors",
    "SamplingParams": "fd_core.types",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fd_core' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
