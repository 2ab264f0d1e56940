"""Import of NIXL, on first use."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from typing import Any, Final, NamedTuple

from fd_core.errors import PluginError

_MODULES: Final = ("nixl_cu13", "nixl_cu12")
"""The distribution `nixl` brings both and picks one by the CUDA version; host memory is the same to either."""
_NEEDED: Final = ("nixl_agent", "nixl_agent_config", "nixl_thread_sync_t")
_TRIED: Final = "1.5"


class Library(NamedTuple):
    """An imported NIXL."""

    api: Any
    errors: tuple[type[Exception], ...]
    """Types of the exceptions that its calls raise."""


def load_library() -> Library:
    """Import NIXL. Raises `PluginError` if it is not installed, or not usable here."""
    name = next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)
    if name is None:
        raise PluginError(
            "the connector nixl needs NIXL, which is not installed",
            field="--kv-connector",
            hint="pip install 'nixl-cu13>=1.5.1,<1.6', or use --kv-connector tcp",
        )
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # read at the import; it would write to stdout otherwise
    raising = logging.raiseExceptions
    try:
        api = importlib.import_module(name)
        bindings = importlib.import_module(f"{name}._bindings")
    except (ImportError, OSError) as error:
        raise PluginError(
            f"NIXL ({name}) cannot be imported: {error}",
            field="--kv-connector",
            hint="repair its installation, or use --kv-connector tcp",
        ) from error
    finally:
        logging.raiseExceptions = raising  # the import switches it off for the whole process
    missing = [needed for needed in _NEEDED if not hasattr(api, needed)]
    if missing:
        raise PluginError(
            f"NIXL ({name}) has no {missing[0]}", field="--kv-connector", hint=f"install a version {_TRIED} of it"
        )
    raised = (getattr(bindings, name) for name in dir(bindings))
    own = tuple(one for one in raised if isinstance(one, type) and issubclass(one, Exception))
    return Library(api, (*own, RuntimeError, ValueError))
